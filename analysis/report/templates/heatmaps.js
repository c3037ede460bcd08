// The clickable heatmaps: a button per cell. A colour scale runs over a panel with its full cache, over all panels, or
// to both sides of no difference.
const SCORES = ["#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8"];
const DIFFERENCES = ["#b2182b", "#d6604d", "#f4a582", "#fddbc7", "#f7f7f7", "#d1e5f0", "#92c5de", "#4393c3", "#2166ac"];
const DECISIONS = { holds: "✓", costs: "(✓)", loses: "†" };
const MARKED = {
  "=": "nothing was evicted, so this is the full cache", "§": "no row was packed", "*": "not finished",
  "°": "decided with fewer draws, so the score leans the way of its label",
  "‡": "this reading of the published figure is doubted",
};
const boards = document.getElementById("boards"), scale = document.getElementById("scale");

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// The colour at a place from 0 to 1 between the stops, and the ink, black or white, that has more contrast to it.
function colours(stops, place) {
  const at = Math.min(Math.max(place, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  const [from, to] = [channels(stops[low]), channels(stops[low + 1])];
  const rgb = from.map((channel, i) => Math.round(channel + (to[i] - channel) * (at - low)));
  const light = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
  return [`rgb(${rgb})`, luminance > 0.179 ? "#000" : "#fff"];
}

// What a cell says beyond its score: as a tooltip, and to a screen reader.
function spoken(cell) {
  const tests = unknown(cell.these_low) ? "" : `difference to the full cache ${percent(cell.diff_to_full, true)} points (${signedInterval(cell.these_low, cell.these_high)})`;
  const p = unknown(cell.p_loses) ? "" : `p ${pValue(cell.p_loses)} of a loss`;
  const graded = cell.partial ? `${cell.graded} of ${counted(cell.completions, "completion")} graded` : counted(cell.graded, "answer");
  const marks = [...cell.marks].map((mark) => MARKED[mark]);
  return [nameOf(cell), scoreOf(cell), graded, cell.partial ? "" : cell.decision, tests, p, ...marks].filter(Boolean).join(", ");
}

function cellButton(id, range, difference) {
  const cell = names[id], value = difference ? cell.diff_to_full : cell.pass_at_1, known = !unknown(value);
  const score = known ? percent(value, difference) : cell.graded || !cell.completions ? MISSING : "?";
  const button = make("button", score + (known ? cell.marks : ""), "cell");
  if (DECISIONS[cell.decision]) button.append(make("b", DECISIONS[cell.decision]));
  const error = known && !unknown(cell.se) ? `±${percent(cell.se)}` : "";
  if (!difference) button.append(make("small", known && cell.partial ? `${error} (${cell.graded})` : error));
  button.dataset.cell = id;
  button.title = spoken(cell);
  button.setAttribute("aria-label", button.title);
  const place = range[1] > range[0] ? (value - range[0]) / (range[1] - range[0]) : 0.5;
  if (known) [button.style.background, button.style.color] = colours(difference ? DIFFERENCES : SCORES, place);
  button.classList.toggle("off", !matches(cell));
  button.onclick = () => show(id);
  return button;
}

// The lowest and the highest value of some cells; around zero for differences.
function rangeOf(ids, difference) {
  const values = ids.map((id) => names[id][difference ? "diff_to_full" : "pass_at_1"]).filter((value) => !unknown(value));
  if (!values.length) return [0, 1];
  const most = Math.max(...values.map(Math.abs), 0.01);
  return difference ? [-most, most] : [Math.min(...values), Math.max(...values)];
}

function colourBar(range, difference) {
  const bar = make("div", null, "scale"), stops = difference ? DIFFERENCES : SCORES, ramp = make("i");
  ramp.style.background = `linear-gradient(to right, ${stops})`;
  bar.append(make("span", percent(range[0], difference)), ramp, make("span", percent(range[1], difference)));
  return bar;
}

function heads(table, corner, texts) {
  const row = table.createTHead().insertRow();
  row.append(corner);
  texts.forEach((text) => { const head = make("th", text); head.scope = "col"; row.append(head); });
}

function heatRow(body, name, ids, ranges, difference) {
  const row = body.insertRow(), head = make("th", name);
  head.scope = "row";
  row.append(head);
  ids.forEach((id, i) => { const cell = row.insertCell(); if (id) cell.append(cellButton(id, ranges[i], difference)); });
}

function heatPanel(grid, map, whole, difference) {
  const table = make("table", null, "heatmap"), caption = table.createCaption(), own = [...map.rows.flat(), map.full].filter(Boolean);
  const range = whole || rangeOf(own, difference);
  caption.append(map.title);
  if (map.full) {
    const full = make("span", "full cache ");
    full.append(cellButton(map.full, difference ? [0, 0] : range, false));
    caption.append(full);
  }
  heads(table, make("td", "window ↓ ratio →", "axis"), grid.ratios);
  map.rows.forEach((ids, i) => heatRow(table.tBodies[0] || table.createTBody(), grid.windows[i], ids, ids.map(() => range), difference));
  const box = make("div");
  box.append(table, colourBar(range, difference));
  return box;
}

function policyTable(part, whole, difference) {
  const box = make("div", null, "wide"), table = make("table", null, "heatmap policies");
  const ranges = part.heads.map((_, i) => whole || rangeOf(part.rows.map(([, ids]) => ids[i]).filter(Boolean), difference));
  heads(table, make("th", "policy, keep ratio / window", "text"), part.heads);
  part.rows.forEach(([name, ids]) => heatRow(table.tBodies[0] || table.createTBody(), name, ids, ranges, difference));
  box.append(table);
  return box;
}

function drawBoards() {
  const { grids, tables } = read("heatmap-data"), difference = scale.value === "difference";
  const idsOf = (map) => [...map.rows.flat(), map.full].filter(Boolean), wanted = (ids) => ids.some((id) => id && matches(names[id]));
  const whole = scale.value === "own" ? null : rangeOf(grids.flatMap((grid) => grid.panels.flatMap(idsOf)), difference);
  boards.replaceChildren();
  grids.forEach((grid) => {
    const maps = grid.panels.filter((map) => wanted(map.rows.flat())), panels = make("div", null, "panels");
    panels.append(...maps.map((map) => heatPanel(grid, map, whole, difference)));
    if (maps.length) boards.append(make("h3", grid.title), panels);
  });
  tables.forEach((part) => {
    const rows = part.rows.filter(([, ids]) => wanted(ids)), heading = grids.length ? "settings outside the grids" : "all settings";
    if (rows.length) boards.append(make("h3", `${part.title} | ${heading}`), policyTable({ ...part, rows }, difference ? whole : null, difference));
  });
}
scale.onchange = drawBoards;
