// Numbers as texts, as kvsweep.analysis.notation writes them; a dash where one is unknown.
const MISSING = "–";
const unknown = (value) => value === undefined || value === null;
// Halves go to the even digit, as in Python: 81.25 is 81.2 on the page and in the figures. Of the doubles only .25 and .75 are halves.
const tenths = (value) => (Math.abs(value) % 1 === 0.25 ? value - Math.sign(value) / 100 : value).toFixed(1);
const percent = (share, signed) => {
  const text = unknown(share) ? MISSING : tenths(100 * share).replace(/^-0\.0$/, "0.0");
  return signed && /^\d/.test(text) ? `+${text}` : text;
};
const plusMinus = (share, error, signed) => percent(share, signed) + (unknown(share) || unknown(error) ? "" : ` ± ${percent(error)}`);
const signedInterval = (low, high) => (unknown(low) ? MISSING : `${percent(low, true)} to ${percent(high, true)}`);
const number = (value) => (unknown(value) ? MISSING : String(value));
const decimal = (value, digits) => (unknown(value) || isNaN(value) ? MISSING : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const pValue = (p) => (unknown(p) ? MISSING : p < 0.001 ? "<0.001" : p.toFixed(3));
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const nameOf = (cell) => cell.name ?? `${cell.model_title} | ${cell.benchmark_title}: ${cell.setting}`;
// The other side of a comparison: the full cache, or the baseline of `kvsweep judge`, which has a name of its own.
const fullTitle = (full) => full?.name ?? "full cache";
const fullWords = (full) => full?.name ?? "the full cache";
const besideFull = (cell, full) => (cell.said ? `; ${cell.said}` : full && full !== cell && !unknown(cell.diff_to_full) ? `; ${fullWords(full)} ${percent(full.pass_at_1)}, difference ${percent(cell.diff_to_full, true)} points: ${cell.decision || "not finished"}` : "");
const scoreOf = (cell) => (cell.graded ? `Pass@1 ${plusMinus(cell.pass_at_1, cell.se)}` : "no grade yet");

// The filter over all tables: what is chosen, and if a cell fits.
const FILTERS = [["model", (cell) => cell.model_title], ["benchmark", (cell) => cell.benchmark_title], ["policy", (cell) => cell.policy_title], ["verdict", (cell) => cell.decision]];
const chosen = (name) => document.getElementById(`filter-${name}`)?.value ?? "";
const filtered = () => Object.fromEntries(FILTERS.map(([name]) => [name, chosen(name)]).filter(([, value]) => value));
const matches = (cell) => FILTERS.every(([name, valueOf]) => !chosen(name) || chosen(name) === valueOf(cell));

