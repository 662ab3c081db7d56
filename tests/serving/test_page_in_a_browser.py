"""What a user of the page sees, in a real Chromium."""

import contextlib
import http.server
import json
import threading

import pytest

from t2t_jax.data.task import TASKS
from t2t_jax.decoding.hypothesis import Hypothesis
from tests.serving.conftest import DEFAULTS, served
from tests.visualization.conftest import chromium  # noqa: F401  (a fixture)

pytestmark = pytest.mark.browser
TREE = "(TOP (S (NP (DT The) (NN <img>)) (VP (VBZ -LRB-sits-LRB-x-RRB--RRB-)) (. .)))"
WAIT = 120


@pytest.fixture
def visit(chromium):  # noqa: F811
    """Opens the page of a server; what the browser logged and asked for until the end of the test is checked."""
    chromium.get_log("browser"), chromium.get_log("performance")
    hosts = set()

    def open_page(client, width=1280, url=None):
        url = url or f"http://{client.host}/"
        hosts.add(url)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        chromium.get(url)
        wait(chromium, "return document.title !== 't2t_jax'")
        return chromium

    yield open_page
    assert [entry for entry in chromium.get_log("browser") if "status of 400" not in entry["message"]] == []
    messages = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith((*hosts, "data:,")) for url in urls)


def wait(browser, script):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, WAIT, 0.1).until(lambda _: browser.execute_script(script))


def translate(browser, text, **options):
    for name, value in {"source": text, **options}.items():
        field = browser.find_element("id", name)
        field.clear()
        field.send_keys(str(value))
    browser.find_element("id", "submit").click()
    wait(browser, "return !document.getElementById('submit').disabled")


def texts(browser, selector):
    return [found.text for found in browser.find_elements("css selector", selector)]


def test_the_n_best_are_shown_with_their_scores_and_their_attention(visit, client):
    browser = visit(client)
    translate(browser, "one two\n\nthree", beam_size=3, n_best=3, alpha=1)
    _, answers = client.post({"source": ["one two", "three"], "beam_size": 3, "n_best": 3, "alpha": 1})
    found = [hypothesis for answer in answers for hypothesis in answer["hypotheses"]]
    assert not browser.find_element("id", "constrained").is_displayed()  # this run has no trees
    assert texts(browser, "h2") == ["one two", "three"] and len(found) == 6
    assert texts(browser, ".text") == [hypothesis["text"] for hypothesis in found]
    shown = [float(text.removeprefix("score ")) for text in texts(browser, ".score")]
    assert shown == pytest.approx([hypothesis["score"] for hypothesis in found], abs=1e-4)
    numbers = [text.split()[1] for text in texts(browser, ".score, .log-prob")]
    assert len(numbers) == 12 and all(len(number.partition(".")[2]) == 4 for number in numbers)
    browser.find_element("css selector", ".numbers button").click()
    wait(browser, "return document.querySelector('iframe')")
    browser.switch_to.frame(browser.find_element("css selector", "iframe"))
    wait(browser, "return document.querySelectorAll('#lines line').length > 0")
    browser.switch_to.default_content()


@contextlib.contextmanager
def below_a_prefix(client):
    """The URL of the page behind a reverse proxy that gives it a prefix and keeps Host."""
    passed_on = ("Host", "Origin", "Content-Type", "Sec-Fetch-Site")

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if not self.path.startswith("/mt/"):
                return self.send_error(404)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
            given = {name.replace("-", "_"): self.headers[name] for name in passed_on}
            status, headers, content = client.request(self.command, self.path.removeprefix("/mt"), body, **given)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET
        log_message = lambda *arguments: None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}/mt/"
        proxy.shutdown()


def test_a_reverse_proxy_may_give_the_page_a_prefix(visit, client):
    with below_a_prefix(client) as url:
        browser = visit(client, url=url)
        translate(browser, "one two", beam_size=2, n_best=1)
        browser.find_element("css selector", ".numbers button").click()
        wait(browser, "return document.querySelector('iframe')")
        browser.switch_to.frame(browser.find_element("css selector", "iframe"))
        wait(browser, "return document.querySelectorAll('#lines line').length > 0")
        browser.switch_to.default_content()


def test_the_sentences_of_a_line_are_translated_one_by_one_if_asked_to(visit, client):
    browser, text = visit(client), "One two. Three four."
    for parts in (None, 2):
        translate(browser, text, beam_size=2, n_best=1, alpha=1)
        _, answer = client.post(
            {"source": text, "beam_size": 2, "n_best": 1, "alpha": 1, "split_sentences": parts is not None}
        )
        assert texts(browser, ".text") == [hypothesis["text"] for hypothesis in answer["hypotheses"]]
        assert ("translated in 2 parts" in texts(browser, ".numbers")[0]) == (parts is not None)
        assert (texts(browser, ".numbers button") == []) == (parts is not None)
        browser.find_element("id", "split_sentences").click()


def test_what_the_server_refuses_is_shown_in_its_words(visit, client):
    browser = visit(client, width=390)
    translate(browser, "one", beam_size=2, n_best=5)
    assert browser.find_element("id", "status").text == "n_best must be between 1 and beam_size=2; got 5"
    assert browser.execute_script("return document.documentElement.scrollWidth <= 390")


@pytest.mark.parametrize("modifier", ["ctrlKey", "metaKey"])
def test_enter_held_down_with_ctrl_or_command_asks_once_at_a_time(visit, client, modifier):
    browser = visit(client)
    browser.find_element("id", "source").send_keys("one two")
    browser.execute_script(
        "window.asked = 0; const fetched = window.fetch;"
        "window.fetch = (...call) => { window.asked++; return fetched(...call); };"
        "const event = { key: 'Enter', [arguments[0]]: true, bubbles: true };"
        "const source = document.getElementById('source');"
        "for (let n = 0; n < 20; n++) source.dispatchEvent(new KeyboardEvent('keydown', event));",
        modifier,
    )
    wait(browser, "return document.querySelector('.sentence') && !document.getElementById('submit').disabled")
    assert browser.execute_script("return window.asked") == 1


def test_an_emptied_field_has_the_value_of_the_run(visit, client):
    browser = visit(client)
    for name in ("beam_size", "n_best", "alpha"):
        browser.find_element("id", name).clear()
    translate(browser, "one two")
    _, answer = client.post({"source": "one two"})
    assert browser.find_element("id", "status").text == ""
    assert texts(browser, ".text") == [hypothesis["text"] for hypothesis in answer["hypotheses"]]


class Parser:
    """A translator that answers with one tree, to see it drawn."""

    def __init__(self, translator):
        self.ensemble, self.vocabularies, self.mesh = translator.ensemble, translator.vocabularies, translator.mesh
        self.task, self.preprocessor = TASKS["parsing_in_order"], translator.preprocessor

    def translate(self, sentences, **options):
        return [[Hypothesis(TREE, ["▁XX"], -1.5, -1.25, 1, [-1.5])] for _ in sentences]


class Stutterer:
    """A translator whose hypothesis is cut off, and has other tokens than its text is encoded into."""

    TOKENS = ("▁", "d", "r", "e", "i")

    def __init__(self, translator):
        self.ensemble, self.vocabularies, self.mesh = translator.ensemble, translator.vocabularies, translator.mesh
        self.task, self.preprocessor, self.attention = translator.task, translator.preprocessor, translator.attention

    def translate(self, sentences, **options):
        return [[Hypothesis("drei", list(self.TOKENS), -1.5, -1.25, 5, [-0.3] * 5, finished=False)] for _ in sentences]


def test_the_attention_shown_is_that_of_the_tokens_of_the_hypothesis(visit, translator):
    with served(Stutterer(translator), DEFAULTS) as client:
        browser = visit(client)
        translate(browser, "one two")
        browser.find_element("css selector", ".numbers button").click()
        wait(browser, "return document.querySelector('iframe')")
        browser.switch_to.frame(browser.find_element("css selector", "iframe"))
        wait(browser, "return document.querySelectorAll('#lines line').length > 0")
        browser.execute_script(
            "for (const value of ['decoder', 'subwords']) document.querySelector(`input[value=${value}]`).click()"
        )
        assert texts(browser, "#queries .token") == list(Stutterer.TOKENS)
        browser.switch_to.default_content()


def test_a_parse_is_drawn_as_a_tree(visit, translator):
    with served(Parser(translator), DEFAULTS) as client:
        browser = visit(client)
        translate(browser, "The <img> (sits(x)) .")
        nodes = sorted(texts(browser, ".tree text"))
        assert nodes == sorted(["TOP", "S", "NP", "DT", "NN", "VP", "VBZ", ".", ".", "The", "<img>", "(sits(x))"])
        places = browser.execute_script(
            "return Object.fromEntries([...document.querySelectorAll('.tree text')].map((text) =>"
            " [text.textContent, [text.x.baseVal[0].value, text.y.baseVal[0].value]]))"
        )
        words = [places[word] for word in ("The", "<img>", "(sits(x))")]
        assert len({y for _, y in words}) == 1 and [x for x, _ in words] == sorted(x for x, _ in words)
        for parent, child in ("TOP", "S"), ("S", "NP"), ("NP", "DT"), ("VP", "VBZ"), ("VBZ", "(sits(x))"):
            assert places[parent][1] < places[child][1]
        assert places["NP"][0] == pytest.approx((places["DT"][0] + places["NN"][0]) / 2)
        assert browser.find_element("id", "submit").text == "Parse"
        assert browser.find_element("id", "constrained").is_displayed()
