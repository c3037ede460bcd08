// The clickable heatmaps: a button per cell, with the texts and colours that the figures have too.
const MARKED = {
  "=": "nothing was evicted, so this is the full cache", "§": "no row was packed", "*": "not finished",
  "°": "decided with fewer draws, so the score leans the way of its label",
  "‡": "this reading of the published figure is doubted",
};
const boards = document.getElementById("boards"), scale = document.getElementById("scale");

// What a cell says beyond its score: as a tooltip, and to a screen reader.
function spoken(cell) {
  const tests = unknown(cell.these_low) ? "" : `difference to the full cache ${percent(cell.diff_to_full, true)} points (${signedInterval(cell.these_low, cell.these_high)})`;
  const p = unknown(cell.p_loses) ? "" : `p ${pValue(cell.p_loses)} of a loss`;
  const graded = cell.partial ? `${cell.graded} of ${counted(cell.completions, "completion")} graded` : counted(cell.graded, "answer");
  const marks = [...cell.marks].map((mark) => MARKED[mark]);
  return [nameOf(cell), scoreOf(cell), graded, cell.partial ? "" : cell.decision, tests, p, ...marks].filter(Boolean).join(", ");
}

function cellButton([id, label, mark, error, background, ink]) {
  const button = make("button", label, "cell"), cell = names[id];
  if (mark) button.append(make("b", mark));
  button.append(make("small", error));
  button.dataset.cell = id;
  button.title = spoken(cell);
  button.setAttribute("aria-label", button.title);
  Object.assign(button.style, { background, color: ink });
  button.classList.toggle("off", !matches(cell));
  button.onclick = () => show(id);
  return button;
}

const wanted = (cells) => cells.some(([id]) => id && matches(names[id]));

// One heatmap; a table of settings has no title and no scale, and shows only the rows that the filter leaves.
function heatmap(map, corner) {
  const box = make("div", null, map.title ? "" : "wide"), table = make("table", null, map.title ? "heatmap" : "heatmap policies");
  const head = table.createTHead().insertRow(), body = table.createTBody();
  if (map.title) {
    const full = make("span", map.full.length ? "full cache " : "");
    full.append(...map.full.map(cellButton));
    table.createCaption().append(map.title, full);
    if (map.chance) table.caption.append(make("small", map.chance));
  }
  head.append(make(map.title ? "td" : "th", corner, map.title ? "axis" : "text"));
  map.columns.forEach((text) => { const cell = make("th", text); cell.scope = "col"; head.append(cell); });
  map.rows.filter(([, cells]) => map.title || wanted(cells)).forEach(([name, cells]) => {
    const row = body.insertRow(), cell = make("th", name);
    cell.scope = "row";
    row.append(cell);
    cells.forEach((one) => { const place = row.insertCell(); if (one[0]) place.append(cellButton(one)); });
  });
  box.append(table);
  if (!map.title) return box;
  const bar = make("div", null, "scale"), ramp = make("i");
  ramp.style.background = `linear-gradient(to right, ${map.ramp})`;
  bar.append(make("span", map.ends[0]), ramp, make("span", map.ends[1]));
  box.append(bar);
  return box;
}

function drawBoards() {
  boards.replaceChildren();
  read("heatmap-data")[scale.value].forEach(({ title, corner, panels }) => {
    const maps = panels.filter((map) => wanted(map.rows.flatMap(([, cells]) => cells)));
    const board = make("section", null, maps[0]?.title ? "" : "settings"), box = make("div", null, "panels");
    board.style.setProperty("--panels", maps.length);
    box.append(...maps.map((map) => heatmap(map, corner)));
    board.append(make("h3", title), box);
    if (maps.length) boards.append(board);
  });
}
scale.onchange = drawBoards;
