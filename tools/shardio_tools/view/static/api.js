/** Requests: the contract of the server, and the same answers from the files of a static export. */

export const isStatic = document.querySelector('meta[name="shardio-mode"]')?.content === 'static';

/** The keys of a query of rows, in the order in which links have them. */
export const FILTERS = ['class', 'subset', 'range', 'text', 'sort', 'desc'];

/** The name of this page: the server stops a search once the page that has asked for it wants another one. */
const page = Math.random().toString(36).slice(2);

export class ApiError extends Error {
  constructor(message, hint = '', status = 0) {
    super(message);
    this.hint = hint;
    this.status = status;
  }
}

async function request(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { credentials: 'same-origin', ...options });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError('The server does not answer.', 'It may have been stopped: start it again with `shardio view`, and open the link that it prints.');
  }
  if (answer.ok) return answer;
  let found = {};
  try { found = await answer.json(); } catch { /* a proxy's page: the status says enough */ }
  throw new ApiError(found.error ?? `The server answered ${answer.status}.`, found.hint ?? '', answer.status);
}

async function json(path, options) {
  return (await request(path, options)).json();
}

function query(params) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== '' && value !== false) found.set(name, value === true ? '1' : value);
  }
  const text = found.toString();
  return text && `?${text}`;
}

function post(path, body = {}) {
  return json(path, { method: 'POST', headers: { 'Content-Type': 'application/json', 'X-Shardio': '1' }, body: JSON.stringify(body) });
}

const server = {
  dataset: (signal) => json('api/dataset', { signal }),
  statistics: (signal) => json('api/statistics', { signal }),
  classes: (subset) => json(`api/classes${query({ subset })}`),
  startStatistics: () => post('api/statistics'),
  rows: (start, n, filters, signal) => json(`api/rows${query({ start, count: n, ...filters, page })}`, { signal }),
  position: (row, filters, signal) => json(`api/position${query({ row, ...filters, page })}`, { signal }),
  sample: (row, signal) => json(`api/sample/${row}`, { signal }),
  epoch: (params, signal) => json(`api/epoch${query(params)}`, { signal }),
  verification: (signal) => json('api/verification', { signal }),
  startVerification: () => post('api/verification'),
  generation: (signal) => json('api/generation', { signal }),
  reload: () => post('api/reload'),
  marks: (signal) => json('api/marks', { signal }),
  mark: (row, marked, note) => post('api/marks', { row, marked, note }),
  saveMarks: (name, overwrite) => post('api/marks/save', { name, overwrite }),
  thumbnail: (row, size) => row.thumb ?? (row.image === null ? null : `thumbnail/${row.row}/${encodeURIComponent(row.image)}?size=${size}`),
  /** Return a URL of a whole file in memory, which can be sought where a server has no ranges. */
  whole: async (url, signal) => URL.createObjectURL(await (await request(url, { signal })).blob()),
  series: (url, points, signal) => json(withParam(url, 'points', points), { signal }),
  /** Return a picture as a bitmap, and the range of the values that it shows. */
  heatmap: async (url, signal) => {
    const answer = await request(url, { signal });
    const range = (answer.headers.get('X-Range') ?? '').split('..').map(Number);
    return { bitmap: await createImageBitmap(await answer.blob()), range: range.length === 2 && range.every(Number.isFinite) ? range : null };
  },
};

function withParam(url, name, value) {
  return /\.json$/.test(url) ? url : `${url}${url.includes('?') ? '&' : '?'}${name}=${value}`;
}

/* --- a static export: rows are filtered here --- */

let exported = null;

async function exportedRows() {
  exported ??= json('api/rows.json').then((found) => found.rows).catch((error) => { exported = null; throw error; });
  return exported;
}

/** Return a number of a row; numbers that JSON cannot hold are texts, and missing ones NaN. */
function numberOf(row, field) {
  return Number(String(row.values?.[field] ?? 'nan').replace('inf', 'Infinity'));
}

function keeps(filters, names, fields) {
  const [rangeField, low, high] = splitRange(filters.range);
  const [textField, text] = splitText(filters.text, fields);
  const words = (text ?? '').toLowerCase().split(/\s+/).filter(Boolean);
  return (row) => {
    if (filters.class && String(row.class ?? names.indexOf(row.label)) !== filters.class) return false;
    if (filters.subset && row.subset !== filters.subset) return false;
    if (rangeField) {
      const value = numberOf(row, rangeField);
      if (Number.isNaN(value) || (low !== '' && value < Number(low)) || (high !== '' && value > Number(high))) return false;
    }
    if (!textField) return true;
    const searched = String(row.values?.[textField] ?? '').toLowerCase();
    return words.every((word) => searched.includes(word));
  };
}

/** Split "FIELD:WORDS", where FIELD is the longest name of a field that fits: names may have colons. */
export function splitText(text, fields) {
  if (!text) return [];
  const known = fields.map((field) => field.name).filter((name) => text.startsWith(`${name}:`));
  const name = known.sort((a, b) => b.length - a.length)[0] ?? text.slice(0, text.indexOf(':'));
  return [name, text.slice(name.length + 1)];
}

/** Split "FIELD:LOW:HIGH" from the right. */
export function splitRange(text) {
  if (!text) return [];
  const parts = text.split(':');
  const high = parts.pop();
  const low = parts.pop();
  return [parts.join(':'), low, high];
}

async function filtered(filters) {
  const { classes = [], fields = [] } = await server.dataset();
  const rows = (await exportedRows()).filter(keeps(filters, classes.map((each) => each.name), fields));
  if (filters.sort) rows.sort(order(filters.sort, filters.desc ? -1 : 1));
  return rows;
}

/** Return how rows are sorted: missing values come last, and equal ones stay in their order. */
function order(field, sign) {
  return (a, b) => {
    const [x, y] = [numberOf(a, field), numberOf(b, field)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a.row - b.row;
    return x < y ? -sign : x > y ? sign : a.row - b.row;
  };
}

const readOnly = async () => { throw new ApiError('This is an exported page: it cannot be changed.', 'Open the dataset itself with `shardio view` to mark, verify or search it.'); };

if (isStatic) {
  const whole = { ...server };
  let dataset = null;
  Object.assign(server, {
    dataset: () => (dataset ??= json('api/dataset.json').catch((error) => { dataset = null; throw error; })),
    statistics: () => json('api/statistics.json').catch(() => ({ state: 'none', progress: 0, text: '', fields: {}, classes: [] })),
    startStatistics: readOnly,
    classes: async () => ({ state: 'none', classes: [] }),
    rows: async (start, n, filters) => {
      const rows = await filtered(filters);
      return { n: rows.length, n_total: (await exportedRows()).length, complete: true, progress: 1,
        rows: rows.slice(start, start + n).map((row, i) => ({ ...row, position: start + i })) };
    },
    position: async (row, filters) => {
      const at = (await filtered(filters)).findIndex((each) => each.row === row);
      return { position: at < 0 ? null : at };
    },
    sample: async (row, signal) => {
      if (!(await exportedRows()).some((each) => each.row === row)) throw new ApiError(`Sample ${row} is not among the exported ones.`, 'Open the dataset itself with `shardio view` to see all of them.', 404);
      return json(`api/sample/${row}.json`, { signal });
    },
    epoch: readOnly,
    verification: readOnly,
    startVerification: readOnly,
    marks: async () => ({ marks: [], n: 0 }),
    mark: readOnly,
    saveMarks: readOnly,
    thumbnail: (row) => row.thumb ?? null,
    series: whole.series,
  });
}

export const api = server;
