"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const cells = new Map(), arrived = new Map(), files = read("files"), allCells = read("cell-data"), names = Object.fromEntries(allCells.map((cell) => [cell.cell_id, cell]));
const drill = document.getElementById("drill"), nonce = document.currentScript.nonce;
let turn = null;
const shown = 200;

// The data of a cell are compressed, in the page or in a file beside it.
const unpacked = (text) => {
  const bytes = new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]);
  return new Response(bytes.stream().pipeThrough(new DecompressionStream("deflate"))).json();
};

window.kvsweepCell = (id, text) => arrived.get(id)(text);

const fileOf = (id) => new Promise((resolve) => {
  const script = document.createElement("script");
  arrived.set(id, resolve);
  script.src = files[id];
  script.nonce = nonce;
  script.onerror = () => { drill.append(make("p", `${files[id]} cannot be loaded: it belongs beside this page, and the server has to hand it out.`, "alert")); };
  document.head.append(script);
});

// The data of a cell, read once.
function cellData(id) {
  const block = document.querySelector(`script[data-for="${CSS.escape(id)}"]`), nothing = { draws: [], problems: {} };
  if (!cells.has(id)) cells.set(id, block ? unpacked(block.textContent) : files[id] ? fileOf(id).then(unpacked) : nothing);
  return cells.get(id);
}

const isWorse = (draw, twin) => twin && twin.outcome === "correct" && draw.outcome && draw.outcome !== "correct";
// Outputs of other engines have no tokens; their length is that of the text.
const sizeOf = (draw) => draw.tokens ?? draw.characters, unitOf = (draw) => (draw.characters === undefined ? "token" : "character");
const keyOf = (draw) => `${draw.draw} ${draw.problem}`;

// Without the tokens, the text falls in three: the common beginning, the first word that differs, the rest.
function marked(draw, other) {
  if (draw.lengths) return draw;
  let shared = 0;
  while (shared < draw.text.length && draw.text[shared] === other.text[shared]) shared += 1;
  const word = draw.text.slice(shared).match(/^\s*\S*/)[0].length;
  return { ...draw, lengths: [shared, word, draw.text.length - shared - word], held: [] };
}

function pane(name, draw) {
  const view = make("section"), line = make("p"), box = make("div", null, "draw");
  line.append(make("b", draw.outcome || "no grade", draw.outcome), `${draw.answer === undefined ? "" : `, answer ${draw.answer ?? "none"}`}, ${counted(sizeOf(draw), unitOf(draw))}`);
  if (draw.evictions && draw.evictions.length) line.append(`, ${counted(draw.evictions.length, "eviction")}`);
  if (draw.loop) line.append(`, ends in a loop: ${draw.loop[0]} tokens, ${draw.loop[1]} times`);
  view.append(make("h4", name), line, box);
  return { view, box };
}

function slider(events, change) {
  const label = make("label", "Show the cache "), choice = make("input"), said = make("b");
  Object.assign(choice, { type: "range", min: 1, max: events.length + 1, value: events.length + 1 });
  const move = (at, through) => {
    const event = events[at];
    choice.value = at + 1;
    said.textContent = event ? `after eviction ${at + 1} of ${events.length}, at token ${event[0]}` : "at the end of the text";
    choice.setAttribute("aria-valuetext", said.textContent);
    change(at, through);
  };
  choice.oninput = () => move(Number(choice.value) - 1);
  label.append(choice, " ", said);
  return { label, move };
}

// One completion beside the full cache's.
function showPair(view, cellName, full, problem, draw, twin) {
  view.replaceChildren(make("h3", `${draw.problem}, draw ${draw.draw}`));
  const asked = make("details", null, "plain");
  asked.open = innerWidth > 640;
  asked.append(make("summary", `Question; the right answer is ${problem.gold ?? "not stored"}`), make("p", problem.question ?? "The question is not stored.", "draw"));
  view.append(asked);
  if (draw.text === undefined) return view.append(make("p", "The text of this completion is not on the page.", "note"));
  const beside = twin && twin.text !== undefined;
  const apart = beside && (draw.same < sizeOf(draw) || draw.same < sizeOf(twin));
  const left = beside && pane(fullTitle(full), twin), right = pane(cellName, draw);
  const pair = make("div", null, "pair"), bar = make("div", null, "bar"), chart = make("div", null, "chart");
  const events = draw.evictions, counted = Boolean(draw.lengths && (!beside || twin.lengths));
  const fork = counted && events.length ? events[0][0] + 1 : -1, differs = apart ? (counted ? draw.same : 1) : -1;
  // The text as an eviction found it, or on through a token behind that eviction.
  const fill = (at, through = 0) => {
    const event = events[at], upto = event && draw.held.length ? Math.max(through, writtenBy(draw.held[at]) - draw.prompt) : Infinity;
    const look = { fork, differs, upto };
    if (left) fillText(left.box, apart ? marked(twin, draw) : twin, look);
    fillText(right.box, apart ? marked(draw, twin) : draw, { ...look, eviction: Math.min(at, events.length - 1) });
    if (draw.tokens) chart.replaceChildren(timeline(draw, beside ? twin : null, at));
  };
  const shaded = counted && draw.held.length > 0;
  let move = fill;
  if (shaded) {
    const part = slider(events, fill);
    bar.append(part.label);
    move = part.move;
  } else if (events.length) {
    bar.append(make("span", draw.lengths ? "Which tokens went is not recorded for this text." : "The run holds no tokenizer of this model, so the tokens that went cannot be shown.", "note"));
  }
  move(events.length);
  if (apart) {
    // The cache as the token that differs found it.
    const jump = make("button", counted ? `first difference, token ${differs}` : "first difference");
    jump.onclick = () => {
      const last = events.findLastIndex((event) => event[0] < differs);
      if (shaded && last >= 0) move(last, differs + 1);
      (right.box.querySelector(".differs, .fork") || right.box).scrollIntoView({ block: "center" });
    };
    bar.append(jump);
  } else if (beside) bar.append(make("span", "Both texts are the same."));
  if (twin && !beside) bar.append(make("span", `The text of ${fullWords(full)} is not on the page.`, "note"));
  if (events.length) {
    const key = make("p", null, "note");
    if (counted) key.append(make("span", null, "fork"), " The bar stands where this cell first evicted tokens; up to there both texts are one. ");
    if (apart) key.append("Outlined: the first token that differs. ");
    if (shaded) key.append("Struck through: tokens that the cache no longer holds; the earlier they went, the stronger the line. Move the slider to see which had gone at which token. ");
    const someHeads = (percent, i) => i % 2 === 0 && percent > 0 && percent < 100;
    if (shaded && draw.held.some((runs) => runs.some(someHeads))) key.append("On an orange ground: tokens that only some of the heads still hold. ");
    key.append(`Evictions came at token ${events.slice(0, 12).map((event) => event[0]).join(", ")}${events.length > 12 ? " and later" : ""}. In the chart, the dashed line is the full cache.`);
    view.append(key);
  }
  if (left) pair.append(left.view);
  pair.append(right.view);
  view.append(bar, chart, pair);
}

// The address names the open cell and completion, so that a link leads to them and the back button closes them.
const address = () => new URLSearchParams(location.hash.slice(1));

// Called after the view has changed. In a frame without an address (srcdoc) a browser refuses both steps, and the view stays.
function remember(state, step = "replaceState") {
  const hash = `#${new URLSearchParams({ ...filtered(), ...state })}`;
  try { history[step](null, "", hash); } catch { }
}

function show(id, problem = null) {
  showCell(id, problem, null);
  remember(problem === null ? { cell: id } : { cell: id, problem }, "pushState");
}

function followAddress() {
  const asked = address(), id = asked.get("cell");
  if (names[id]) return showCell(id, asked.get("problem"), asked.get("draw"));
  if (drill.open) drill.close();
}
window.addEventListener("popstate", followAddress);
drill.addEventListener("close", () => {
  if (drill.open) return; // it was opened again before this event came
  turn = null;
  if (address().has("cell")) remember({});
});

// All completions of a cell. The first that opens is the wanted one, or else one that the full cache has right and this cell wrong.
async function showCell(id, problem, number) {
  const name = nameOf(names[id]), header = make("header"), buttons = make("span", null, "buttons"), title = make("h2", name);
  const [before, after, close] = ["previous (p)", "next (n)", "close"].map((text) => make("button", text));
  title.id = "drill-name";
  close.onclick = () => drill.close();
  buttons.append(before, after, close);
  header.append(title, make("span", scoreOf(names[id])), buttons);
  drill.replaceChildren(header, make("p", "loading"));
  if (!drill.open) drill.showModal();
  turn = id;
  const cell = await cellData(id), base = cell.base && await cellData(cell.base), full = names[cell.base];
  if (turn !== id) return; // another cell was opened meanwhile
  const twins = new Map((base ? base.draws : []).map((draw) => [keyOf(draw), draw])), twinOf = (draw) => twins.get(keyOf(draw));
  header.children[1].textContent += besideFull(names[id], full);
  const worse = new Set(cell.draws.filter((draw) => isWorse(draw, twinOf(draw))));
  const side = make("details", null, "side"), view = make("div", null, "view"), list = make("div"), more = make("button", "more completions");
  const filter = make("input"), search = make("input"), label = make("label"), columns = make("div", null, "columns");
  list.id = "list";
  filter.type = "checkbox";
  label.append(filter, ` right with ${fullWords(full)}, wrong here (${worse.size})`);
  side.open = innerWidth > 640;
  Object.assign(search, { type: "search", placeholder: "question, text or answer", ariaLabel: "Search in questions, texts and answers" });
  side.append(make("summary", "Completions"), label, search, list, more);
  const lengths = make("details", null, "plain"), pairs = cell.draws.map((draw) => ({ draw, twin: twinOf(draw) }));
  lengths.append(make("summary", "Accuracy against text length"), lengthChart(pairs));
  columns.append(side, view);
  drill.replaceChildren(header, lengths, columns);
  if (cell.left_out) side.prepend(make("p", `${counted(cell.left_out, "more completion")} not on this page.`, "note"));
  if (!cell.draws.length) return view.append(make("p", "There is no completion here to show."));
  let kept = cell.draws, current = null;
  const open = (draw) => {
    current = draw;
    showPair(view, name, full, cell.problems[draw.problem] || {}, draw, twinOf(draw));
    while (kept.indexOf(draw) >= list.children.length && !more.hidden) more.onclick();
    [...list.children].forEach((one) => one.setAttribute("aria-current", one.dataset.key === keyOf(draw)));
    const chosen = list.querySelector("[aria-current=true]");
    if (chosen) chosen.focus();
    remember({ cell: id, problem: draw.problem, draw: draw.draw });
  };
  const item = (draw) => {
    const entry = make("button", `${draw.problem}, draw ${draw.draw}: `);
    entry.dataset.key = keyOf(draw);
    entry.append(make("b", draw.outcome || "no grade", draw.outcome));
    if (worse.has(draw)) entry.append(" ", make("span", `${fullTitle(full)}: correct`, "worse"));
    entry.onclick = () => open(draw);
    return entry;
  };
  const searched = (draw) => [draw.problem, draw.text, draw.answer, (cell.problems[draw.problem] || {}).question].join("\n").toLowerCase();
  const fill = () => {
    kept = (filter.checked ? [...worse] : cell.draws).filter((draw) => searched(draw).includes(search.value.toLowerCase()));
    list.replaceChildren();
    more.onclick = () => {
      list.append(...kept.slice(list.children.length, list.children.length + shown).map(item));
      more.hidden = list.children.length >= kept.length;
    };
    more.onclick();
  };
  const step = (way) => { const next = kept[kept.indexOf(current) + way]; if (next) open(next); };
  filter.onchange = () => { fill(); if (kept.length) open(kept[0]); };
  search.oninput = fill;
  before.onclick = () => step(-1);
  after.onclick = () => step(1);
  drill.onkeydown = (event) => { if (event.target !== search && !event.ctrlKey && !event.metaKey && "np".includes(event.key)) step(event.key === "n" ? 1 : -1); };
  const candidates = cell.draws.filter((draw) => (!problem || draw.problem === problem) && (number === null || String(draw.draw) === number));
  filter.checked = candidates.some((draw) => worse.has(draw));
  fill();
  open(candidates.find((draw) => worse.has(draw)) || candidates[0] || cell.draws[0]);
  arrows(list, "button", () => 1, (next) => next.click());
}

// Arrow keys move the focus among the parts of a box; `across` is the number of parts in a row.
function arrows(box, parts, across, moved = () => {}) {
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: across(), ArrowUp: -across(), ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const all = [...box.querySelectorAll(parts)], next = all[all.indexOf(document.activeElement) + step];
    if (!step || !next) return;
    event.preventDefault();
    if (document.activeElement.tabIndex === 0 && next.tabIndex < 0) [document.activeElement.tabIndex, next.tabIndex] = [-1, 0];
    next.focus();
    moved(next);
  });
}

// Maps of outcomes: blue is right, warm colours are wrong; of several draws the share that is right.
const OUTCOMES = { c: ["correct", "#4393c3"], w: ["wrong", "#f4a582"], t: ["truncated", "#b2182b"], n: ["no answer", "#762a83"], g: ["grader timeout", "#000"], u: ["no grade", "#e3e8ed"], "-": ["no completion", "#fff"] };

function colourOf(letters) {
  const graded = [...letters].filter((letter) => !"u-".includes(letter)), right = graded.filter((letter) => letter === "c").length;
  if (!graded.length) return OUTCOMES[letters[0]][1];
  const wrong = graded.find((letter) => letter !== "c");
  return wrong ? `color-mix(in srgb, ${OUTCOMES.c[1]} ${(100 * right) / graded.length}%, ${OUTCOMES[wrong][1]})` : OUTCOMES.c[1];
}

function outcomeMap(panel) {
  const box = make("div"), scroll = make("div", null, "map"), table = make("table"), said = make("output");
  const draws = panel.draws.length, at = (cell, p) => cell.outcomes.slice(p * draws, (p + 1) * draws);
  const solved = panel.problems.map((_, p) => panel.cells.reduce((sum, cell) => sum + at(cell, p).split("c").length - 1, 0));
  const order = panel.problems.map((_, p) => p).sort((a, b) => solved[b] - solved[a]);
  const cellsInOrder = [...panel.cells].sort((a, b) => b.full - a.full);
  const full = cellsInOrder[0].full ? cellsInOrder[0] : null;
  const tell = (cell, p) => {
    const count = (one) => `${at(one, p).split("c").length - 1} of ${draws} right`;
    const single = draws === 1 ? OUTCOMES[at(cell, p)][0] : count(cell);
    const beside = full && full !== cell ? `; ${full.name}: ${draws === 1 ? OUTCOMES[at(full, p)][0] : count(full)}` : "";
    return `${panel.problems[p]} | ${cell.name}: ${single}${beside}`;
  };
  cellsInOrder.forEach((cell) => {
    const row = table.insertRow(), head = make("th", cell.name);
    head.scope = "row";
    row.append(head);
    order.forEach((p) => {
      const node = row.insertCell();
      node.style.background = colourOf(at(cell, p));
      node.tabIndex = -1;
      node.onmouseenter = node.onfocus = () => { said.textContent = tell(cell, p); };
      node.onclick = () => show(cell.id, panel.problems[p]);
      node.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); node.click(); } };
    });
  });
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", `Outcomes, ${panel.title}`);
  if (table.querySelector("td")) table.querySelector("td").tabIndex = 0;
  arrows(table, "td", () => order.length);
  scroll.append(table);
  box.append(scroll, said);
  return box;
}

const outcomes = document.getElementById("outcomes");

function drawOutcomes() {
  const legend = make("p", "", "note"), panels = read("outcome-data");
  const letters = new Set(panels.flatMap((panel) => panel.cells.flatMap((cell) => [...cell.outcomes])));
  const keys = Object.entries(OUTCOMES).filter(([letter]) => letters.has(letter)).map(([, key]) => key);
  if (panels.some((panel) => panel.draws.length > 1)) keys.push(["right in some of the draws", `linear-gradient(to right, ${OUTCOMES.w[1]}, ${OUTCOMES.c[1]})`]);
  keys.forEach(([name, colour]) => {
    const key = make("span", "", "key");
    key.style.background = colour;
    legend.append(key, name);
  });
  outcomes.replaceChildren(...(panels.length ? [legend] : []));
  panels.forEach((panel, i) => {
    const cells = panel.cells.filter((cell) => cell.full || matches(names[cell.id]));
    if (!cells.some((cell) => matches(names[cell.id]))) return;
    const part = make("details", null, "plain");
    part.append(make("summary", `${panel.title}: ${counted(cells.length, "setting")}, ${counted(panel.problems.length, "problem")}`));
    part.addEventListener("toggle", () => { if (part.open && part.children.length === 1) part.append(outcomeMap({ ...panel, cells })); });
    outcomes.append(part);
    part.open = i === 0;
  });
}
