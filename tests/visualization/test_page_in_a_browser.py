"""What a reader of the page sees, in a real Chromium."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from t2t_jax.visualization.page import LEVELS, page
from tests.visualization.maps import HOSTILE, random_maps

pytestmark = pytest.mark.browser

WORDS = [0, 0, 1, 2, 2, 3]
TOKENS = ["▁a", "b", "▁c", "▁d", "e", "</s>"]
LINES = """return [...document.querySelectorAll("#lines line")].map((line) => [
    ...["data-query", "data-key", "data-head", "stroke-opacity"].map((name) => Number(line.getAttribute(name)))])"""

SIDES = """return ["queries", "keys"].map((id) => {
    const box = document.getElementById(id).getBoundingClientRect(); return [box.left, box.right]; })"""


@pytest.fixture
def show(chromium, tmp_path):
    """Opens the page of some maps; what it logged and asked for until the end of the test is checked."""
    chromium.get_log("browser"), chromium.get_log("performance")

    def open_page(*maps, width=1280, height=900, scheme="light"):
        path = tmp_path / "attention.html"
        path.write_text(page(maps, "Test"), encoding="utf-8")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chromium.get(path.as_uri())
        return chromium

    yield open_page
    assert chromium.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    requests = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert requests and {url for url in requests if not url.endswith("/attention.html")} == set()


def maps():
    return random_maps(TOKENS, TOKENS, words=WORDS)


def click(browser, selector):
    browser.find_element("css selector", selector).click()


def choose(browser, group, value):
    click(browser, f"#{group} input[value='{value}']")


def drawn(browser):
    """{(query, key, head from 1): weight} of the lines."""
    return {(q, k, head): weight for q, k, head, weight in browser.execute_script(LINES)}


def hover(browser, selector):
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(browser.find_element("css selector", selector)).perform()


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def table(browser):
    """Rows of the table of one token: {label: [weight of each head]}."""
    rows = browser.execute_script("""return [...document.querySelectorAll("#detail tbody tr")].map(
        (row) => [...row.children].map((cell) => cell.textContent))""")
    return {label: list(map(float, weights)) for label, *weights in rows}


def test_the_lines_are_the_weights_of_the_model_for_every_kind_layer_and_unit(show, translator):
    (found,) = translator.attention(["one two three"], ["drei zwei eins eins"])
    browser = show(found)
    for kind, layer, unit in itertools.product(
        ("encoder", "decoder", "encoder_decoder"), (1, 2), ("words", "subwords")
    ):
        choose(browser, "kinds", kind), choose(browser, "layers", layer - 1), choose(browser, "units", unit)
        map = getattr(found.words() if unit == "words" else found, kind)
        error = (0.5 if unit == "subwords" else 0.5 * max(map.weights.shape[3], len(found.source))) / LEVELS + 1e-6
        lines = drawn(browser)
        for (query, key, head), weight in lines.items():
            assert abs(weight - map.head(layer, head)[query, key]) <= error
        hidden = np.ones_like(map.weights[layer - 1], bool)
        for query, key, head in lines:
            hidden[head - 1, query, key] = False
        assert lines and map.weights[layer - 1][hidden].max(initial=0) < 0.01 + error
        texts = [
            browser.execute_script(f"return [...document.getElementById('{side}').children].map(b => b.textContent)")
            for side in ("queries", "keys")
        ]
        assert texts == [[token.replace("</s>", "<EOS>") for token in tokens] for tokens in (map.queries, map.keys)]


def test_head_boxes_add_and_remove_their_lines(show):
    browser = show(maps())
    assert {head for _, _, head in drawn(browser)} == {1, 2, 3}
    click(browser, "#heads input[value='1']")
    assert {head for _, _, head in drawn(browser)} == {1, 3}
    click(browser, "#none")
    assert drawn(browser) == {} and "No head" in browser.find_element("id", "status").text
    click(browser, "#heads input[value='1']")
    assert {head for _, _, head in drawn(browser)} == {2}
    click(browser, "#all")
    assert {head for _, _, head in drawn(browser)} == {1, 2, 3}


def test_a_chosen_token_has_no_table_where_no_head_is_chosen(show):
    browser = show(maps())
    click(browser, "#queries .token")
    click(browser, "#none")
    assert browser.find_element("id", "detail").text == "No head is chosen."
    click(browser, "#all")
    assert table(browser)


def test_pointing_at_a_token_isolates_it_and_shows_its_weights(show):
    browser, found = show(maps()), maps().words().encoder
    everything = drawn(browser)
    hover(browser, "#queries .token:nth-child(2)")
    assert drawn(browser) == {place: weight for place, weight in everything.items() if place[0] == 1}
    expected = found.weights[1, :, 1]  # [head, key]; the page opens with the last layer
    rows = table(browser)
    for label, weights in rows.items():
        if "others" not in label:
            key = found.keys.index(label.replace("<EOS>", "</s>"))
            np.testing.assert_allclose(weights, expected[:, key], atol=0.0005 + 2 / LEVELS)
    np.testing.assert_allclose(np.sum(list(rows.values()), axis=0), 1, atol=0.01)

    hover(browser, "#keys .token:nth-child(3)")
    assert drawn(browser) == {place: weight for place, weight in everything.items() if place[1] == 2}
    hover(browser, "h1")
    assert drawn(browser) == everything and table(browser) == {}

    click(browser, "#queries .token:nth-child(1)")
    browser.execute_script("document.activeElement.blur()")
    hover(browser, "h1")
    assert {query for query, _, _ in drawn(browser)} == {0}, "a click keeps the token"


def test_a_word_whose_rounded_weights_sum_to_more_than_1_has_its_stripes(show):
    tokens = ["▁a", *"b" * 48, "</s>"]
    found = random_maps(tokens, tokens, words=[0] * 49 + [1])
    weights = np.where(np.arange(50) < 49, 1 / 49, 0) + np.zeros_like(found.encoder.weights)
    browser = show(dataclasses.replace(found, encoder=dataclasses.replace(found.encoder, weights=weights)))
    hover(browser, "#queries .token")
    stripes = browser.execute_script("return document.querySelector('#keys .token').style.backgroundImage")
    assert stripes.startswith("linear-gradient"), "a colour that is not valid is dropped"


def test_the_overview_has_every_head_and_choosing_one_shows_it_alone(show):
    browser = show(maps())
    buttons = browser.find_elements("css selector", "#overview button")
    labels = [button.get_attribute("aria-label") for button in buttons]
    assert labels == [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2, 3)]
    buttons[1].click()
    expected = maps().words().encoder.head(1, 2)
    lines = drawn(browser)
    assert {head for _, _, head in lines} == {2}
    for (query, key, _), weight in lines.items():
        assert abs(weight - expected[query, key]) < 3 / LEVELS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_weight_has_the_same_colour_in_chosen_tiles_and_in_others(show, scheme):
    browser = show(maps(), scheme=scheme)
    paper = browser.find_element("css selector", "body").value_of_css_property("background-color")
    behind = browser.execute_script(
        "return ['.shown', ':not(.shown)'].map((kind) => getComputedStyle("
        "document.querySelector(`#overview button${kind} canvas`)).backgroundColor)"
    )
    assert [re.findall(r"\d+", colour)[:3] for colour in behind] == [re.findall(r"\d+", paper)[:3]] * 2
    assert all(re.fullmatch(r"rgb\(.*\)|rgba\(.*, 1\)", colour) for colour in behind), "not transparent"


def test_a_group_is_one_stop_of_the_tab_key_after_a_click_too(show):
    from selenium.webdriver import Keys

    browser = show(maps())
    stops = "return [...document.querySelectorAll(`#${arguments[0]} button`)].flatMap((b, n) => b.tabIndex ? [] : [n])"
    for group in ("queries", "keys", "overview"):
        assert browser.execute_script(stops, group) == [0]
        browser.find_elements("css selector", f"#{group} button")[2].click()
        assert browser.execute_script(stops, group) == [2]
        press(browser, Keys.ARROW_RIGHT)
        assert browser.execute_script(stops, group) == [3]


def test_everything_is_reached_and_used_by_the_keyboard(show):
    from selenium.webdriver import Keys

    browser = show(maps(), random_maps(["x", "</s>"], ["y", "</s>"]))
    active = "const e = document.activeElement; return e.id || (e.closest('[id]') || e).id"
    stops = []
    for _ in range(40):
        press(browser, Keys.TAB)
        stops.append(browser.execute_script(active))
    order = [stop for stop, _ in itertools.groupby(stops)]
    expected = ["sentence", "kinds", "units", "layers", "heads", "all", "none", "queries", "keys"]
    assert order[: len(expected)] == expected and {"overview", "detail"} <= set(order)

    browser.execute_script("document.querySelector('#queries .token').focus()")
    assert {query for query, _, _ in drawn(browser)} == {0}
    press(browser, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert {query for query, _, _ in drawn(browser)} == {2}
    press(browser, Keys.ENTER, Keys.TAB)
    browser.execute_script("document.activeElement.blur()")
    assert {query for query, _, _ in drawn(browser)} == {2}
    press(browser, Keys.ESCAPE)
    assert len({query for query, _, _ in drawn(browser)}) > 2
    browser.execute_script("document.querySelector('#overview button').focus()")
    press(browser, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ENTER)
    assert {head for _, _, head in drawn(browser)} == {2}


def test_another_sentence_can_be_chosen(show):
    browser = show(maps(), random_maps(["x", "</s>"], ["y", "</s>"]))
    browser.find_elements("css selector", "#sentence option")[1].click()
    assert [token.text for token in browser.find_elements("css selector", "#queries .token")] == ["x", "<EOS>"]
    assert browser.find_element("id", "pair").text == "x → y"


def test_words_of_scripts_without_spaces_are_joined_in_the_sentence(show):
    thai = ["ที่", "นี่"]
    browser = show(random_maps(["打开", "灯", "now", "关闭", "</s>"], [*thai, "now", "</s>"]))
    assert browser.find_element("id", "source").text == "打开灯 now 关闭"
    assert browser.find_element("id", "target").text == f"{thai[0]}{thai[1]} now"


@pytest.mark.parametrize(("width", "scheme"), list(itertools.product((1280, 390), ("light", "dark"))))
def test_hostile_tokens_are_text_and_nothing_overflows(show, width, scheme):
    browser = show(random_maps([*HOSTILE, "</s>"], HOSTILE), width=width, scheme=scheme)
    for kind, unit in itertools.product(("encoder", "decoder", "encoder_decoder"), ("words", "subwords")):
        choose(browser, "kinds", kind), choose(browser, "units", unit)
        for token in browser.find_elements("css selector", "#queries .token")[:3]:
            token.click()
        assert browser.execute_script("return window.hacked === undefined && document.images.length === 0")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        heights = browser.execute_script("return [...document.querySelectorAll('.token')].map((t) => t.offsetHeight)")
        assert set(heights) == {26}
        (_, right), (left, _) = browser.execute_script(SIDES)
        assert left - right >= 60, "there is room for the lines"
    shown = [token.get_attribute("textContent") for token in browser.find_elements("css selector", "#keys .token")]
    assert [shown[n] for n in (0, 4, 5)] == [HOSTILE[n] for n in (0, 4, 5)]
    assert (shown[3], shown[10]) == ("·evil·", "··[31m")


def test_five_hundred_tokens_are_drawn_by_their_strongest_weights(show):
    tokens = [f"t{n}" for n in range(500)]
    browser = show(random_maps(tokens, tokens, 2, 2))
    lines = drawn(browser)
    assert (
        len(lines) == 3000
        and "of 500,000 weights drawn; the weaker ones are not" in browser.find_element("id", "status").text
    )
    strongest = np.sort(random_maps(tokens, tokens, 2, 2).encoder.weights[1].ravel())[-3000]
    assert min(lines.values()) >= strongest - 1 / LEVELS
    hover(browser, "#queries .token:nth-child(2)")
    assert {query for query, _, _ in drawn(browser)} == {1}


def test_an_empty_translation_is_shown(show):
    browser = show(random_maps(["</s>"], []))
    for kind in ("decoder", "encoder_decoder", "encoder"):
        choose(browser, "kinds", kind)
        assert bool(drawn(browser)) == (kind == "encoder")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(show, scheme):
    browser = show(maps(), scheme=scheme)
    click(browser, "#queries .token:nth-child(2)")

    def luminance(colour):
        channels = np.array([int(x) for x in re.findall(r"\d+", colour)[:3]]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    colour = lambda selector, name: luminance(
        browser.find_element("css selector", selector).value_of_css_property(name)
    )
    paper = colour("body", "background-color")
    assert (paper < 0.1) == (scheme == "dark")
    for selector in ("body", "#status", ".token.dim", "legend", "footer", "h3"):
        low, high = sorted([paper, colour(selector, "color")])
        assert (high + 0.05) / (low + 0.05) >= 4.5, selector
