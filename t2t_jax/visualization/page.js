"use strict";
// Draws the weights of the JSON in #data. Tokens are set as text only, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const WITHOUT_SPACES = new RegExp(DATA.without_spaces, "u");  // a character of a script without spaces
const VALUE_OF_DIGIT = new Map([...DIGITS].map((digit, value) => [digit.charCodeAt(0), value]));
const KINDS = { encoder: "Encoder", decoder: "Decoder", encoder_decoder: "Encoder–decoder" };
const SIDES = {  // what the two columns are
  encoder: ["source token that attends", "source token attended to"],
  decoder: ["target token, when predicted", "target token read before"],
  encoder_decoder: ["target token, when predicted", "source token attended to"],
};
const FAINTEST = 0.01;  // weights below this are not drawn
const MOST_LINES = 3000;
const NO_HEAD = "No head is chosen.";
const LARGEST_THUMBNAIL = 96;  // pixels; longer sentences show the largest weight of each block

const byId = (id) => document.getElementById(id);
const range = (count) => Array.from({ length: count }, (_, n) => n);
const state = {
  sentence: 0, kind: "encoder", layer: DATA.layers - 1, heads: new Set(range(DATA.heads)), unit: "words",
  pointed: null, kept: null,  // {side: "queries" or "keys", index}: the token under the mouse or focus; the one clicked
};

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// --- The weights -------------------------------------------------------------------------------------------

/** The weights of a head as a flat array, row by row, from two base-64 digits each; of a causal map the keys 0 to q. */
function unpack(digits, rows, columns, causal) {
  const weights = new Float64Array(rows * columns);
  let at = 0;
  for (let q = 0; q < rows; q++) {
    for (let k = 0; k < (causal ? q + 1 : columns); k++, at += 2) {
      const value = 64 * VALUE_OF_DIGIT.get(digits.charCodeAt(at)) + VALUE_OF_DIGIT.get(digits.charCodeAt(at + 1));
      weights[q * columns + k] = value / DATA.levels;
    }
  }
  return weights;
}

/** Weights between words: the sum over the subwords of the key, the mean over those of the query. */
function merge(weights, ofQueries, ofKeys) {
  const merged = new Float64Array(ofQueries.texts.length * ofKeys.texts.length);
  const lengths = ofQueries.texts.map(() => 0);
  for (const word of ofQueries.numbers) lengths[word]++;
  ofQueries.numbers.forEach((query, q) => ofKeys.numbers.forEach((key, k) => {
    merged[query * ofKeys.texts.length + key] += weights[q * ofKeys.numbers.length + k] / lengths[query];
  }));
  return merged;
}

const cache = new Map();

/** {queries, keys, weights(layer, head)} of the kind of attention and the unit that are chosen. */
function currentMap() {
  const { sentence, kind, unit } = state, map = DATA.sentences[sentence][kind], words = unit === "words";
  return {
    queries: words ? map.query_words.texts : map.queries,
    keys: words ? map.key_words.texts : map.keys,
    weights(layer, head) {
      const name = [sentence, kind, unit, layer, head].join();
      if (!cache.has(name)) {
        const raw = unpack(map.weights[layer][head], map.queries.length, map.keys.length, map.causal);
        cache.set(name, words ? merge(raw, map.query_words, map.key_words) : raw);
      }
      return cache.get(name);
    },
  };
}

// --- The map: two columns of tokens and the lines between ---------------------------------------------------

const chosen = () => state.pointed ?? state.kept;
const shownHeads = () => [...state.heads].sort((a, b) => a - b);

/** A token as it is shown: EOS as in the paper, control characters as dots. */
const label = (token) => token === "</s>" ? "<EOS>" : token.replace(/(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "·") || " ";

function drawTokens(map) {
  for (const side of ["queries", "keys"]) {
    const buttons = map[side].map((token, index) => {
      const button = element("button", { type: "button", className: "token", textContent: label(token), title: label(token), dir: "auto", tabIndex: index ? -1 : 0 });
      button.setAttribute("aria-pressed", "false");
      const here = { side, index };
      button.addEventListener("mouseenter", () => point(here));
      button.addEventListener("mouseleave", () => point(null));
      button.addEventListener("focus", () => point(here));
      button.addEventListener("blur", () => point(null));
      button.addEventListener("click", () => keep(same(state.kept, here) ? null : here));
      return button;
    });
    byId(side).replaceChildren(...buttons);
  }
  const [queries, keys] = SIDES[state.kind];
  byId("queries-title").textContent = queries;
  byId("keys-title").textContent = keys;
}

const same = (a, b) => a !== null && b !== null && a.side === b.side && a.index === b.index;

function point(token) {
  if (same(state.pointed, token)) return;
  state.pointed = token;
  drawChosen();
}

function keep(token) {
  state.kept = token;
  if (token === null) state.pointed = null;
  drawChosen();
}

/** [query, key, head, weight] of all weights that are shown, and how many there are of them in all. */
function shownWeights(map) {
  const found = [], columns = map.keys.length, only = chosen();
  let all = 0;
  for (const head of shownHeads()) {
    map.weights(state.layer, head).forEach((weight, at) => {
      const query = Math.floor(at / columns), key = at % columns;
      if (only && (only.side === "queries" ? query : key) !== only.index) return;
      all++;
      if (weight >= FAINTEST) found.push([query, key, head, weight]);
    });
  }
  if (found.length > MOST_LINES) found.sort((a, b) => b[3] - a[3]).length = MOST_LINES;
  return [found, all];
}

function drawLines(map) {
  const svg = byId("lines"), row = byId("queries").firstElementChild?.offsetHeight ?? 0;
  const width = svg.getBoundingClientRect().width, height = row * Math.max(map.queries.length, map.keys.length);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const [found, all] = shownWeights(map), heads = shownHeads(), only = chosen();
  // The lines of one token: those of different heads end beside each other, so that their colours do not mix.
  const shift = (head, side) => only && only.side !== side ? (0.7 * (heads.indexOf(head) + 0.5)) / heads.length - 0.35 : 0;
  svg.replaceChildren(...found.map(([query, key, head, weight]) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const attributes = {
      x1: 0, y1: (query + 0.5 + shift(head, "queries")) * row, x2: width, y2: (key + 0.5 + shift(head, "keys")) * row, stroke: DATA.colours[head],
      "stroke-opacity": Math.min(weight, 1), "data-query": query, "data-key": key, "data-head": head + 1,
    };
    for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
    return line;
  }));
  const left = found.length < MOST_LINES ? `weights below ${FAINTEST} are not` : "the weaker ones are not";
  const count = `${found.length.toLocaleString("en")} of ${all.toLocaleString("en")} weights drawn`;
  byId("status").textContent = state.heads.size === 0 ? NO_HEAD : `${count}${found.length < all ? `; ${left}` : ""}.`;
}

/** The weight between the chosen token and token n of the other side. */
function weightToChosen(map, head, n) {
  const { side, index } = chosen(), [query, key] = side === "queries" ? [index, n] : [n, index];
  return map.weights(state.layer, head)[query * map.keys.length + key];
}

/** Stripes in the heads' colours, as opaque as the weights to the chosen token, as in the paper's figures. */
function stripes(map, n) {
  const heads = shownHeads(), edge = (count) => `${((100 * count) / heads.length).toFixed(2)}%`;
  const stops = heads.map((head, at) => {
    const weight = Math.min(weightToChosen(map, head, n), 1);  // a sum of rounded weights may be larger
    const alpha = Math.round(255 * weight).toString(16).padStart(2, "0");
    return `${DATA.colours[head]}${alpha} ${edge(at)} ${edge(at + 1)}`;
  });
  return stops.length ? `linear-gradient(to right, ${stops.join(", ")})` : "";
}

function markTokens(map) {
  const only = chosen();
  for (const side of ["queries", "keys"]) {
    [...byId(side).children].forEach((button, index) => {
      const here = { side, index };
      button.classList.toggle("chosen", same(only, here));
      button.classList.toggle("dim", only !== null && only.side === side && only.index !== index);
      button.setAttribute("aria-pressed", String(same(state.kept, here)));
      button.style.backgroundImage = only !== null && only.side !== side ? stripes(map, index) : "";
    });
  }
}

// --- The table of one token ---------------------------------------------------------------------------------

function drawDetail(map) {
  const only = chosen();
  if (only === null || state.heads.size === 0) {
    const hint = only === null ? "Point at, tap or focus a token to see its weights." : NO_HEAD;
    byId("detail").replaceChildren(element("p", { textContent: hint }));
    return;
  }
  const isQuery = only.side === "queries", others = isQuery ? map.keys : map.queries, heads = shownHeads();
  const weight = (head, n) => weightToChosen(map, head, n);
  const rows = range(others.length).filter((n) => heads.some((head) => weight(head, n) >= FAINTEST));
  const rest = range(others.length).filter((n) => !rows.includes(n));
  const cells = (values) => values.map((value) => element("td", { textContent: value.toFixed(3) }));
  const body = rows.map((n) => element("tr", {}, element("th", { scope: "row", textContent: label(others[n]), title: label(others[n]), dir: "auto" }), ...cells(heads.map((head) => weight(head, n)))));
  if (rest.length) {
    const sums = heads.map((head) => rest.reduce((sum, n) => sum + weight(head, n), 0));
    body.push(element("tr", {}, element("th", { scope: "row", textContent: `${rest.length} others` }), ...cells(sums)));
  }
  const headings = heads.map((head) => {
    const heading = element("th", { scope: "col", textContent: head + 1 });
    heading.style.setProperty("--head", DATA.colours[head]);
    return heading;
  });
  const name = element("bdi", { textContent: label(map[only.side][only.index]) });
  byId("detail").replaceChildren(
    element("p", {}, "“", name, isQuery ? "” attends to" : "” is attended to by", ` (layer ${state.layer + 1}):`),
    element("table", {}, element("thead", {}, element("tr", {}, element("th", { scope: "col", textContent: "head" }), ...headings)), element("tbody", {}, ...body)),
  );
}

// --- The overview of all layers and heads -------------------------------------------------------------------

function thumbnail(weights, rows, columns) {
  const [height, width] = [rows, columns].map((count) => Math.max(1, Math.min(LARGEST_THUMBNAIL, count)));
  const canvas = element("canvas", { width, height }), context = canvas.getContext("2d");
  const image = context.createImageData(width, height), ink = getComputedStyle(document.body).color.match(/\d+/g).map(Number);
  for (let at = 0; at < weights.length; at++) {
    const y = Math.floor(Math.floor(at / columns) * height / rows), x = Math.floor((at % columns) * width / columns);
    const pixel = 4 * (y * width + x);
    image.data.set(ink.slice(0, 3), pixel);
    image.data[pixel + 3] = Math.max(image.data[pixel + 3], Math.round(255 * weights[at]));
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function drawOverview(map) {
  const number = (text) => element("span", { className: "number", textContent: text });
  const cells = [number(""), ...range(DATA.heads).map((head) => number(head + 1))];
  for (const layer of range(DATA.layers)) {
    cells.push(number(layer + 1));
    for (const head of range(DATA.heads)) {
      const button = element("button", { type: "button", tabIndex: layer || head ? -1 : 0 }, thumbnail(map.weights(layer, head), map.queries.length, map.keys.length));
      button.setAttribute("aria-label", `layer ${layer + 1}, head ${head + 1}`);
      button.style.setProperty("--head", DATA.colours[head]);
      button.addEventListener("click", () => change({ layer, heads: new Set([head]) }));
      cells.push(button);
    }
  }
  byId("overview").style.gridTemplateColumns = `1.2em repeat(${DATA.heads}, minmax(0, 64px))`;
  byId("overview").replaceChildren(...cells);
}

function markOverview() {
  byId("overview").querySelectorAll("button").forEach((button, at) => {
    const shown = Math.floor(at / DATA.heads) === state.layer && state.heads.has(at % DATA.heads);
    button.classList.toggle("shown", shown);
    button.setAttribute("aria-pressed", String(shown));
  });
}

// --- Controls -----------------------------------------------------------------------------------------------

function radios(id, values, labels) {
  byId(id).append(...values.map((value, n) => {
    const input = element("input", { type: "radio", name: id, value });
    input.addEventListener("change", () => change({ [{ kinds: "kind", units: "unit", layers: "layer" }[id]]: value }));
    return element("label", {}, input, labels[n]);
  }));
}

function markControls() {
  const values = { kinds: state.kind, units: state.unit, layers: String(state.layer) };
  for (const [id, value] of Object.entries(values)) {
    byId(id).querySelectorAll("input").forEach((input) => { input.checked = input.value === value; });
  }
  byId("heads").querySelectorAll("input").forEach((input) => { input.checked = state.heads.has(Number(input.value)); });
  byId("sentence").value = String(state.sentence);
  byId("source").textContent = sentenceText(DATA.sentences[state.sentence].encoder);
  byId("target").textContent = sentenceText(DATA.sentences[state.sentence].decoder);
}

/** The words of one side of a sentence, without EOS. */
function sentenceText(map) {
  const words = map.query_words.texts;
  const shown = words.slice(0, words.at(-1) === "</s>" ? -1 : undefined).map(label);
  const isApart = (before, after) => !(WITHOUT_SPACES.test([...before].at(-1)) && WITHOUT_SPACES.test([...after][0]));
  return shown.reduce((text, word, n) => text + (n && isApart(shown[n - 1], word) ? " " : "") + word, "");
}

function makeControls() {
  const texts = DATA.sentences.map((sentence) => sentenceText(sentence.encoder));
  byId("sentence").append(...texts.map((text, n) => element("option", { value: n, textContent: `${n + 1}. ${text.slice(0, 200)}` })));
  byId("sentence-choice").hidden = texts.length === 1;
  byId("sentence").addEventListener("change", (event) => change({ sentence: Number(event.target.value) }));
  radios("kinds", Object.keys(KINDS), Object.values(KINDS));
  radios("units", ["words", "subwords"], ["Words", "Subwords"]);
  radios("layers", range(DATA.layers), range(DATA.layers).map((n) => n + 1));
  const boxes = range(DATA.heads).map((head) => {
    const input = element("input", { type: "checkbox", value: head });
    input.addEventListener("change", () => {
      state.heads[input.checked ? "add" : "delete"](head);
      change({});
    });
    const box = element("label", {}, input, String(head + 1));
    box.style.setProperty("--head", DATA.colours[head]);
    return box;
  });
  byId("all").before(...boxes);
  byId("all").addEventListener("click", () => change({ heads: new Set(range(DATA.heads)) }));
  byId("none").addEventListener("click", () => change({ heads: new Set() }));
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
}

/** Arrow keys, Home and End move the focus within a group of buttons, which is one stop of the Tab key: the focused. */
function moveWithArrows(group, columns) {
  group.addEventListener("focusin", ({ target }) => {
    for (const button of group.querySelectorAll("button")) button.tabIndex = button === target ? 0 : -1;
  });
  group.addEventListener("keydown", (event) => {
    const buttons = [...group.querySelectorAll("button")], at = buttons.indexOf(document.activeElement);
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at, End: buttons.length - 1 - at };
    const next = buttons[at + steps[event.key]];
    if (at < 0 || !next) return;
    event.preventDefault();
    next.focus();
  });
}

// --- Drawing ------------------------------------------------------------------------------------------------

function change(changes) {
  const isNew = ["sentence", "kind", "unit"].some((name) => name in changes && changes[name] !== state[name]);
  Object.assign(state, changes);
  if (isNew) draw();
  else redraw();
}

function draw() {
  const map = currentMap();
  state.pointed = state.kept = null;
  drawTokens(map);
  drawOverview(map);
  redraw();
}

function redraw() {
  markControls();
  markOverview();
  drawChosen();
}

function drawChosen() {
  const map = currentMap();
  markTokens(map);
  drawLines(map);
  drawDetail(map);
}

makeControls();
moveWithArrows(byId("queries"), 1);
moveWithArrows(byId("keys"), 1);
moveWithArrows(byId("overview"), DATA.heads);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") keep(null); });
window.addEventListener("resize", () => drawLines(currentMap()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawOverview(currentMap()); redraw(); });
draw();
