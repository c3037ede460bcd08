// Numbers as texts, as kvsweep.analysis.format writes them; a dash where one is unknown.
const MISSING = "–";
const unknown = (value) => value === undefined || value === null;
const signOf = (value, signed) => (signed && value >= 0 ? "+" : "");
const percent = (share, signed) => (unknown(share) ? MISSING : signOf(share, signed) + (100 * share + 0).toFixed(1).replace(/^-0\.0$/, "0.0"));
const plusMinus = (share, error, signed) => percent(share, signed) + (unknown(share) || unknown(error) ? "" : ` ± ${percent(error)}`);
const signedInterval = (low, high) => (unknown(low) ? MISSING : `${percent(low, true)} to ${percent(high, true)}`);
const number = (value) => (unknown(value) ? MISSING : String(value));
const decimal = (value, digits) => (unknown(value) || isNaN(value) ? MISSING : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const pValue = (p) => (unknown(p) ? MISSING : p < 0.001 ? "<0.001" : p.toFixed(3));
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const nameOf = (cell) => `${cell.model_title} | ${cell.benchmark_title}: ${cell.setting}`;
const scoreOf = (cell) => (cell.graded ? `Pass@1 ${plusMinus(cell.pass_at_1, cell.se)}` : "no grade yet");

// The filter over all tables: what is chosen, and if a cell fits.
const FILTERS = [["model", (cell) => cell.model_title], ["benchmark", (cell) => cell.benchmark_title], ["policy", (cell) => cell.policy_title], ["verdict", (cell) => cell.decision]];
const chosen = (name) => document.getElementById(`filter-${name}`).value;
const matches = (cell) => FILTERS.every(([name, valueOf]) => !chosen(name) || chosen(name) === valueOf(cell));

