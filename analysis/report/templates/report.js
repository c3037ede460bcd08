const read = (id) => JSON.parse(document.getElementById(id).textContent);
const cells = new Map(), waiting = new Map(), files = read("files"), names = read("names");
const drill = document.getElementById("drill");
const shown = 200;

window.kvsweepCell = (id, data) => {
  cells.set(id, data);
  (waiting.get(id) || []).forEach((use) => use(data));
  waiting.delete(id);
};

// Call `use` with the data of a cell, once they are there.
function withCell(id, use) {
  const block = [...document.querySelectorAll("script[data-for]")].find((one) => one.dataset.for === id);
  if (!cells.has(id) && block) cells.set(id, JSON.parse(block.textContent));
  if (cells.has(id)) return use(cells.get(id));
  if (!files[id]) return use({ base: null, problems: {}, draws: [], left_out: 0 });
  waiting.set(id, [...(waiting.get(id) || []), use]);
  if (waiting.get(id).length > 1) return;
  const script = document.createElement("script");
  script.src = files[id];
  script.onerror = () => { drill.append(make("p", `${files[id]} is not beside this page.`, "alert")); };
  document.head.append(script);
}

const withPair = (id, use) => withCell(id, (cell) => (cell.base ? withCell(cell.base, (base) => use(cell, base)) : use(cell, null)));
const isWorse = (draw) => draw.full === 1 && draw.outcome && draw.outcome !== "correct";
const keyOf = (draw) => `${draw.draw} ${draw.problem}`;

// The numbers of tokens and the runs of percents, as `packed_lengths` and `packed_runs` of the report write them.
const unpackLengths = (text) => (text.match(/\(\d+\)|./g) || []).map((one) => (one[0] === "(" ? Number(one.slice(1, -1)) : parseInt(one, 36)));
const unpackRuns = (text) => [...text.matchAll(/(?:([a-k])|\((\d+)\))(\d*)/g)].flatMap(([, tens, percent, count]) => [tens ? 10 * (parseInt(tens, 36) - 10) : Number(percent), Number(count || 1)]);

function unpack(draw) {
  if (typeof draw.lengths !== "string") return draw;
  return { ...draw, lengths: unpackLengths(draw.lengths), held: draw.held.map(unpackRuns) };
}

// A completion with its whole text and the lengths of all its tokens; its data begin where it leaves the full cache's.
function whole(draw, twin) {
  if (draw.text === undefined || !twin || twin.text === undefined) return draw;
  const text = twin.text.slice(0, draw.shared) + draw.text;
  const rest = draw.lengths || (draw.same === draw.tokens ? [] : null);
  return { ...draw, text, lengths: twin.lengths && rest ? [...twin.lengths.slice(0, draw.same), ...rest] : draw.lengths };
}

// Without the tokens, the text falls in three: the common beginning, the first word that differs, the rest.
function marked(draw, shared) {
  if (draw.lengths) return draw;
  const word = draw.text.slice(shared).match(/^\s*\S*/)[0].length;
  return { ...draw, lengths: [shared, word, draw.text.length - shared - word], held: [] };
}

function pane(name, draw) {
  const view = make("section"), line = make("p"), box = make("div", null, "draw");
  line.append(make("b", draw.outcome || "no grade", draw.outcome), `, answer ${draw.answer ?? "none"}, ${draw.tokens} tokens`);
  if (draw.evictions && draw.evictions.length) line.append(`, ${draw.evictions.length} evictions`);
  if (draw.loop) line.append(`, ends in a loop: ${draw.loop[0]} tokens, ${draw.loop[1]} times`);
  view.append(make("h4", name), line, box);
  return { view, box };
}

function slider(events, change) {
  const label = make("label", "Show the cache "), choice = make("input"), said = make("b");
  Object.assign(choice, { type: "range", min: 1, max: events.length + 1, value: events.length + 1 });
  choice.oninput = () => {
    const at = Number(choice.value) - 1, event = events[at];
    said.textContent = event ? `after eviction ${at + 1} of ${events.length}, at token ${event[0]}` : "at the end of the text";
    choice.setAttribute("aria-valuetext", said.textContent);
    change(at);
  };
  label.append(choice, " ", said);
  return { label, choice };
}

// One completion beside the full cache's.
function showPair(view, cellName, problem, packed, packedTwin) {
  const bare = unpack(packed), twin = packedTwin && unpack(packedTwin);
  view.replaceChildren(make("h3", `${bare.problem}, draw ${bare.draw}`));
  const asked = make("details", null, "plain");
  asked.append(make("summary", `Question; the right answer is ${problem.gold ?? "not stored"}`), make("p", problem.question ?? "The question is not stored.", "draw"));
  view.append(asked);
  if (bare.text === undefined) return view.append(make("p", "The text of this completion is not on the page.", "note"));
  const draw = whole(bare, twin), beside = twin && twin.text !== undefined;
  const apart = beside && (draw.same < draw.tokens || draw.same < twin.tokens);
  const left = beside && pane("full cache", twin), right = pane(cellName, draw);
  const pair = make("div", null, "pair"), bar = make("div", null, "bar"), chart = make("div");
  const events = draw.evictions, counted = Boolean(draw.lengths && (!beside || twin.lengths));
  const fork = counted && events.length ? events[0][0] + 1 : -1, differs = apart ? (counted ? draw.same : 1) : -1;
  const fill = (at) => {
    const event = events[at], upto = event && draw.held.length ? writtenBy(draw.held[at]) - draw.prompt : Infinity;
    const look = { fork, differs, upto };
    if (left) fillText(left.box, apart ? marked(twin, draw.shared) : twin, look);
    fillText(right.box, apart ? marked(draw, draw.shared) : draw, { ...look, eviction: Math.min(at, events.length - 1) });
    chart.replaceChildren(timeline(draw, beside ? twin : null, at));
  };
  if (counted && draw.held && draw.held.length) {
    const { label, choice } = slider(events, fill);
    bar.append(label);
    choice.oninput();
  } else {
    fill(events.length);
    if (events.length) bar.append(make("span", "Which tokens were evicted is not recorded here, or the model's tokenizer is not on the reporting machine.", "note"));
  }
  if (apart) {
    const jump = make("button", "first difference");
    jump.onclick = () => (right.box.querySelector(".differs, .fork") || right.box).scrollIntoView({ block: "center" });
    bar.append(jump);
  } else if (beside) bar.append(make("span", "Both texts are the same."));
  if (!beside && bare.full >= 0) bar.append(make("span", "The full cache's text is not on the page.", "note"));
  if (events.length) {
    const key = make("p", null, "note");
    key.append(make("span", null, "fork"), " Bar: the fork, behind the first eviction. Outlined: the first token that differs. Shaded: evicted, darker if earlier. In the chart, dashed is the full cache.");
    view.append(key);
  }
  if (left) pair.append(left.view);
  pair.append(right.view);
  view.append(bar, chart, pair);
}

// All completions of a cell; the first one to open is one that was lost, of the wanted problem if there is one.
function show(id, wanted) {
  const { name, score } = names[id], header = make("header"), close = make("button", "close");
  const title = make("h2", name);
  title.id = "drill-name";
  close.onclick = () => drill.close();
  header.append(title, make("span", score), close);
  drill.replaceChildren(header, make("p", "loading"));
  drill.showModal();
  withPair(id, (cell, base) => {
    const twins = new Map((base ? base.draws : []).map((draw) => [keyOf(draw), draw]));
    const problems = { ...(base ? base.problems : {}), ...cell.problems };
    const side = make("div"), view = make("div"), list = make("div"), more = make("button", "more completions");
    const filter = make("input"), label = make("label"), worse = cell.draws.filter(isWorse), columns = make("div", null, "columns");
    list.id = "list";
    filter.type = "checkbox";
    label.append(filter, ` right with the full cache, wrong here (${worse.length})`);
    side.append(label, list, more);
    const lengths = make("details", null, "plain"), pairs = cell.draws.map((draw) => ({ draw, twin: twins.get(keyOf(draw)) }));
    lengths.append(make("summary", "Accuracy against text length"), lengthChart(pairs));
    columns.append(side, view);
    drill.replaceChildren(header, lengths, columns);
    if (cell.left_out) side.prepend(make("p", `The run directory holds ${cell.left_out} more completions.`, "note"));
    if (!cell.draws.length) return view.append(make("p", "There is no completion here to show."));
    const open = (draw) => {
      showPair(view, name, problems[draw.problem] || {}, draw, twins.get(keyOf(draw)));
      [...list.children].forEach((one) => one.setAttribute("aria-current", one.dataset.key === keyOf(draw)));
      list.querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
    };
    const item = (draw) => {
      const entry = make("button", `${draw.problem}, draw ${draw.draw}: `);
      entry.dataset.key = keyOf(draw);
      entry.append(make("b", draw.outcome || "no grade", draw.outcome));
      if (isWorse(draw)) entry.append(" ", make("span", "lost", "worse"));
      entry.onclick = () => open(draw);
      return entry;
    };
    const fill = () => {
      const kept = filter.checked ? worse : cell.draws;
      list.replaceChildren();
      more.onclick = () => {
        list.append(...kept.slice(list.children.length, list.children.length + shown).map(item));
        more.hidden = list.children.length >= kept.length;
      };
      more.onclick();
      if (kept.length) open(kept[0]);
    };
    filter.onchange = fill;
    fill();
    const candidates = cell.draws.filter((draw) => !wanted || draw.problem === wanted);
    const chosen = candidates.find(isWorse) || candidates[0];
    if (chosen) open(chosen);
    arrows(list, "button", () => 1);
  });
}

// Arrow keys move the focus among the parts of a box; `across` is the number of parts in a row.
function arrows(box, parts, across) {
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: across(), ArrowUp: -across(), ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const all = [...box.querySelectorAll(parts)], next = all[all.indexOf(document.activeElement) + step];
    if (!step || !next) return;
    event.preventDefault();
    if (document.activeElement.tabIndex === 0 && next.tabIndex < 0) [document.activeElement.tabIndex, next.tabIndex] = [-1, 0];
    next.focus();
  });
}

document.querySelectorAll("button[data-cell]").forEach((button) => button.addEventListener("click", () => show(button.dataset.cell)));

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
    const beside = full && full !== cell ? `; full cache: ${draws === 1 ? OUTCOMES[at(full, p)][0] : count(full)}` : "";
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

const legend = make("p", "", "note"), outcomes = document.getElementById("outcomes");
Object.values(OUTCOMES).forEach(([name, colour]) => {
  const key = make("span", "", "key");
  key.style.background = colour;
  legend.append(key, name);
});
outcomes.append(legend);
read("outcome-data").forEach((panel, i) => {
  const part = make("details", null, "plain");
  part.append(make("summary", `${panel.title}: ${panel.cells.length} settings, ${panel.problems.length} problems`));
  part.addEventListener("toggle", () => { if (part.open && part.children.length === 1) part.append(outcomeMap(panel)); });
  outcomes.append(part);
  part.open = i === 0;
});

// Tables: a click on a heading sorts, and the choice of columns hides the others.
const numberOf = (text) => {
  const found = text.replace(/,/g, "").replace("<", "").match(/^[+-]?\d+(\.\d+)?/);
  return found ? Number(found[0]) : NaN;
};
document.querySelectorAll("main table:not(.heatmap), main table.policies").forEach((table) => {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const sort = make("button", head.textContent, "sort");
    head.replaceChildren(sort);
    sort.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row) => [row, row.cells[column].textContent.trim()]);
      rows.sort(([, a], [, b]) => {
        const [x, y] = [numberOf(a), numberOf(b)];
        if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
        return (isNaN(x) ? a.localeCompare(b) : x - y) * (down ? -1 : 1);
      });
      table.tBodies[0].append(...rows.map(([row]) => row));
    });
  });
});

const view = document.getElementById("view"), cellTable = document.getElementById("cell-table");
view.onchange = () => {
  const wanted = view.value ? JSON.parse(view.value) : null, heads = [...cellTable.tHead.rows[0].cells];
  const hidden = heads.map((head, i) => i > 0 && wanted && !wanted.includes(head.textContent.trim()));
  [...cellTable.rows].forEach((row) => [...row.cells].forEach((cell, i) => { cell.hidden = Boolean(hidden[i]); }));
};
view.onchange();

// A page that is made again while its sweep runs shows the new one, unless somebody reads a completion.
const reload = Number(document.getElementById("top").dataset.reload);
if (reload) setInterval(() => { if (!drill.open) location.reload(); }, 1000 * reload);
