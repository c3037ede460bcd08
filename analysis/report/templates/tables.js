// The table of cells: its columns, and those that are shown together.
const COLUMNS = {
  model: (cell) => cell.model_title,
  benchmark: (cell) => cell.benchmark_title,
  policy: (cell) => [cell.policy, cell.variant].filter(Boolean).join(", "),
  "keep ratio": (cell) => number(cell.keep_ratio),
  window: (cell) => number(cell.local_window),
  trigger: (cell) => `${number(cell.budget)}${cell.question === "on_top" && cell.budget ? " + question" : ""}`,
  "KV budget": (cell) => `${decimal(cell.mean_length_after, 1)}${cell.question === "on_top" && cell.mean_length_after ? " with question" : ""}`,
  draws: (cell) => number(cell.draws),
  "Pass@1 ± SE": (cell) => plusMinus(cell.pass_at_1, cell.se),
  "95% interval": (cell) => (cell.graded ? `${percent(cell.ci_low)} to ${percent(cell.ci_high)}` : MISSING),
  "pass@k": (cell) => percent(cell[`pass_at_${mostDraws}`]),
  majority: (cell) => percent(cell.maj_at_n),
  "vs full": (cell) => percent(cell.diff_to_full, true),
  interval: (cell) => signedInterval(cell.these_low, cell.these_high),
  verdict: (cell) => cell.decision || MISSING,
  recommended: (cell) => (cell.recommendable ? "yes" : cell.decision ? "no" : MISSING),
  "p (safe)": (cell) => pValue(cell.p_holds),
  "p (worse)": (cell) => pValue(cell.p_loses),
  "problems like these": (cell) => signedInterval(cell.diff_low, cell.diff_high),
  "draws to be safe": (cell) => number(cell.draws_to_hold),
  "problems to be safe": (cell) => number(cell.problems_to_hold),
  regressions: (cell) => number(cell.regressions),
  gains: (cell) => number(cell.gains),
  "texts differ": (cell) => number(cell.texts_differ),
  "beyond control": (cell) => (cell.beyond_control === undefined ? MISSING : cell.beyond_control ? "yes" : "no"),
  "where evicted": (cell) => percent(cell.diff_evicted, true),
  elsewhere: (cell) => percent(cell.diff_untouched, true),
  "lost wholly": (cell) => number(cell.lost_wholly),
  "hard third": (cell) => percent(cell.diff_hard, true),
  "middle third": (cell) => percent(cell.diff_middle, true),
  "easy third": (cell) => percent(cell.diff_easy, true),
  tokens: (cell) => decimal(cell.mean_tokens, 1),
  "tokens, × full": (cell) => decimal(cell.tokens_to_full, 2),
  "tokens per answer": (cell) => decimal(cell.tokens_per_answer, 0),
  "tokens per solved": (cell) => decimal(cell.tokens_per_solved, 0),
  evictions: (cell) => decimal(cell.mean_evictions, 2),
  "evicted %": (cell) => percent(cell.evicted),
  "kept memory %": (cell) => percent(cell.kept_memory),
  "kept memory, % of own text": (cell) => percent(cell.kept_memory_own),
  "kept memory, mean over steps %": (cell) => percent(cell.kept_memory_mean),
  "kept rows %": (cell) => percent(cell.kept_rows),
  "kept rows, % of own text": (cell) => percent(cell.kept_rows_own),
  "peak rows, all problems": (cell) => decimal(cell.peak_rows_together, 0),
  "bytes (declared)": (cell) => number(cell.declared_bytes),
  "bytes a token (measured)": (cell) => decimal(cell.measured_bytes, 0),
  "KiB of a text": (cell) => decimal(cell.kv_bytes_mean / 1024, 1),
  "truncated %": (cell) => percent(cell.truncated),
  looping: (cell) => (cell.truncated_texts ? `${cell.looping_texts} of ${cell.truncated_texts}` : MISSING),
  "no answer %": (cell) => percent(cell.no_answer),
  "timed out %": (cell) => percent(cell.grader_timeout),
  status: (cell) => (cell.status === "done" ? "done" : `partial: ${cell.completions} of ${cell.expected ?? "?"}`),
};
const VIEWS = {
  scores: ["draws", "Pass@1 ± SE", "vs full", "interval", "verdict", "kept memory %", "bytes (declared)", "bytes a token (measured)", "tokens per solved", "status"],
  "what is shown": ["vs full", "interval", "verdict", "texts differ", "beyond control", "recommended", "p (safe)", "p (worse)", "problems like these", "draws to be safe", "problems to be safe"],
  "where the loss sits": ["vs full", "lost wholly", "hard third", "middle third", "easy third", "where evicted", "elsewhere", "regressions", "gains"],
  "cost and gain": ["Pass@1 ± SE", "kept memory %", "kept memory, % of own text", "kept rows %", "kept rows, % of own text", "peak rows, all problems", "bytes (declared)", "bytes a token (measured)", "KiB of a text", "tokens per answer", "tokens per solved", "tokens, × full"],
  lengths: ["tokens", "tokens, × full", "evictions", "evicted %", "kept memory %", "pass@k", "majority", "95% interval"],
  endings: ["truncated %", "looping", "no answer %", "timed out %", "status"],
  settings: ["model", "benchmark", "policy", "keep ratio", "window", "trigger", "KV budget", "draws"],
  all: Object.keys(COLUMNS),
};
const CACHE = ["keep ratio", "window", "trigger", "KV budget", "where evicted", "elsewhere", "evictions", "evicted %", "kept memory %", "kept memory, % of own text", "kept rows %", "kept rows, % of own text", "peak rows, all problems", "KiB of a text", "looping"];
// Only servers have these.
const SERVED = ["bytes (declared)", "bytes a token (measured)", "texts differ", "beyond control"];
const TEXTS = ["model", "benchmark", "policy"];
const mostDraws = Math.max(1, ...allCells.flatMap(Object.keys).filter((name) => /^pass_at_\d+$/.test(name)).map((name) => Number(name.slice(8))));
// Of a server's cache nothing is known but what is declared: a page of servers alone has no columns for the rest.
const served = allCells.every((cell) => cell.engine === "server"), unsaid = new Set([...SERVED, ...(served ? CACHE : [])].filter((name) => allCells.every((cell) => COLUMNS[name](cell) === MISSING)));
const view = document.getElementById("view"), cellTable = document.getElementById("cell-table");

const headCell = (text, name) => { const head = make("th", text, name); head.scope = "col"; return head; };

function drawCells() {
  const compressed = allCells.filter((cell) => matches(cell) && cell.policy !== "full");
  const asked = VIEWS[view.value].filter((name) => !unsaid.has(name) && (mostDraws > 1 || !["pass@k", "majority"].includes(name)));
  // What is the same in each compressed cell is said once.
  const same = asked.filter((name) => compressed.length > 2 && !TEXTS.includes(name) && compressed.every((cell) => COLUMNS[name](cell) === COLUMNS[name](compressed[0])));
  const columns = asked.filter((name) => !same.includes(name));
  document.getElementById("constant").textContent = same.length ? `The same in every compressed cell below: ${same.map((name) => `${name} ${COLUMNS[name](compressed[0])}`).join("; ")}.` : "";
  const heads = make("thead"), body = make("tbody"), top = heads.insertRow();
  top.append(headCell("cell", "text"), ...columns.map((name) => headCell(name.replace("@k", `@${mostDraws}`), TEXTS.includes(name) ? "text" : "")));
  allCells.filter(matches).forEach((cell) => {
    const row = body.insertRow(), head = make("th", null, "text"), open = make("button", cell.setting, "open");
    head.scope = "row";
    row.className = cell.status === "done" ? "" : "partial";
    open.onclick = () => show(cell.cell_id);
    head.append(open, make("small", `${cell.model_title} | ${cell.benchmark_title}`));
    row.append(head, ...columns.map((name) => make("td", COLUMNS[name](cell), TEXTS.includes(name) ? "text" : "")));
  });
  cellTable.replaceChildren(heads, body);
  sortable(cellTable);
}

// A click on a heading sorts.
const numberOf = (text) => {
  const found = text.replace(/,/g, "").replace("<", "").match(/^[+-]?\d+(\.\d+)?/);
  return found ? Number(found[0]) : NaN;
};
function sortable(table) {
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
}

// The tables that came with the page: rows by policy, and by model and benchmark in the table of best settings.
function filterTables() {
  const [model, benchmark, policy] = ["model", "benchmark", "policy"].map(chosen);
  document.querySelectorAll("main .wide:has(table[data-model])").forEach((box) => {
    const table = box.querySelector("table");
    box.hidden = Boolean(model) && table.dataset.model !== model;
    [...table.tBodies[0].rows].forEach((row) => { row.hidden = !row.cells[0].textContent.match(policy ? `^${escaped(policy)}( \\d|,|$)` : ""); });
  });
  const best = document.getElementById("headline");
  if (!best) return;
  [...best.tBodies[0].rows].forEach((row) => { row.hidden = Boolean(model) && row.cells[0].textContent !== model; });
  const heads = [...best.tHead.rows[0].cells].map((head) => head.textContent);
  [...best.rows].forEach((row) => [...row.cells].forEach((cell, i) => { cell.hidden = Boolean(benchmark) && i > 0 && heads[i] !== benchmark; }));
}
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

function draw() {
  drawBoards();
  drawOutcomes();
  drawCells();
  filterTables();
}

Object.keys(VIEWS).forEach((name) => view.add(new Option(name)));
view.onchange = drawCells;
FILTERS.forEach(([name, valueOf]) => {
  const choice = document.getElementById(`filter-${name}`);
  [...new Set(allCells.map(valueOf))].filter(Boolean).forEach((value) => choice.add(new Option(value)));
  choice.value = address().get(name) ?? "";
  if (choice.selectedIndex < 0) choice.value = "";
  choice.onchange = () => { draw(); remember({}); };
});
document.querySelectorAll("main table:not(.heatmap):not(#cell-table):not(#headline)").forEach(sortable);
document.querySelectorAll("#headline button.open").forEach((button) => { button.onclick = () => show(button.dataset.cell); });
document.querySelectorAll("figcaption a").forEach((link) => { link.href = link.closest("figure").querySelector("img").src; });
document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", (event) => {
  const target = document.querySelector(link.getAttribute("href")), section = target.closest("details.section");
  if (section) section.open = true;
  if (location.protocol !== "about:") return;
  event.preventDefault(); // in a srcdoc frame the link would lead to the page around the frame
  target.scrollIntoView();
}));
window.addEventListener("beforeprint", () => document.querySelectorAll("details.verdicts").forEach((part) => { part.open = true; }));
draw();
followAddress();

// A page that is made again while its sweep runs shows the new one, unless somebody reads a completion.
const reload = Number(document.getElementById("top").dataset.reload);
if (reload) setInterval(() => { if (!drill.open) location.reload(); }, 1000 * reload);
