/** Elements, icons and the formatting of numbers. Text is only ever set as text, never as HTML. */

const SVG = 'http://www.w3.org/2000/svg';

/**
 * Create an element. A property named `on…` is a listener, `style` an object of CSS properties;
 * all others are attributes (null, undefined and false leave them out). Children are nodes or text.
 */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'style') {
      for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    } else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Replace all children of a node. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const PATHS = {
  play: 'M4 2.5v11l9-5.5z',
  pause: 'M4 2.5h3v11H4zM9 2.5h3v11H9z',
  back: 'M11 3v10L5 8zM3.5 3H5v10H3.5z',
  forward: 'M5 3v10l6-5zM11 3h1.5v10H11z',
  previous: 'M10.5 2.5 5 8l5.5 5.5 1.2-1.2L7.4 8l4.3-4.3z',
  next: 'M5.5 2.5 4.3 3.7 8.6 8l-4.3 4.3 1.2 1.2L11 8z',
  flag: 'M3.5 1.5H5V3h8l-2 3.2L13 9.5H5v5H3.5z',
  close: 'm3.6 4.7 1.1-1.1L8 6.9l3.3-3.3 1.1 1.1L9.1 8l3.3 3.3-1.1 1.1L8 9.1l-3.3 3.3-1.1-1.1L6.9 8z',
  download: 'M7.2 1.5h1.6v6.6l2.5-2.5 1.1 1.1L8 11.1 3.6 6.7l1.1-1.1 2.5 2.5zM2.5 12.9h11v1.6h-11z',
  filter: 'M1.5 2.5h13L9.4 8.7v4.8l-2.8-1.4V8.7z',
  grid: 'M2 2h5v5H2zM9 2h5v5H9zM2 9h5v5H2zM9 9h5v5H9z',
  list: 'M2 3h12v1.6H2zM2 7.2h12v1.6H2zM2 11.4h12V13H2z',
  link: 'M6.6 9.4 9.4 6.6M7 4.6l1.3-1.3a3.1 3.1 0 0 1 4.4 4.4L11.4 9M9 11.4l-1.3 1.3a3.1 3.1 0 0 1-4.4-4.4L4.6 7',
  sound: 'M2 5.8h2.6L8.4 2.6v10.8L4.6 10.2H2zM10 5.4a3.4 3.4 0 0 1 0 5.2M11.6 3.4a6 6 0 0 1 0 9.2',
  mute: 'M2 5.8h2.6L8.4 2.6v10.8L4.6 10.2H2zM10.4 6l4 4M14.4 6l-4 4',
  full: 'M2 2h4.5v1.6H3.6v2.9H2zM9.5 2H14v4.5h-1.6V3.6H9.5zM2 9.5h1.6v2.9h2.9V14H2zM12.4 9.5H14V14H9.5v-1.6h2.9z',
  up: 'M8 4 2.8 9.2l1.1 1.1L8 6.2l4.1 4.1 1.1-1.1z',
  down: 'M8 12l5.2-5.2-1.1-1.1L8 9.8 3.9 5.7 2.8 6.8z',
};
const STROKED = new Set(['link', 'sound', 'mute']);

/** Return an icon, hidden from assistive technology: the control around it has the name. */
export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('viewBox', '0 0 16 16');
  svg.setAttribute('class', STROKED.has(name) ? 'icon stroked' : 'icon');
  svg.setAttribute('aria-hidden', 'true');
  const path = document.createElementNS(SVG, 'path');
  path.setAttribute('d', PATHS[name]);
  svg.append(path);
  return svg;
}

/** Return a button with an icon; `name` is its accessible name and tooltip, `key` its shortcut. */
export function iconButton(name, label, onclick, key = '', props = {}) {
  return h('button', { type: 'button', class: 'icon-button', 'aria-label': label, title: key ? `${label} (${key})` : label,
    'aria-keyshortcuts': key || null, onclick, ...props }, icon(name));
}

/** Change the icon and the name of an icon button. */
export function setIcon(button, name, label, key = '') {
  if (button.dataset.icon === name) return;
  button.dataset.icon = name;
  button.setAttribute('aria-label', label);
  button.title = key ? `${label} (${key})` : label;
  button.replaceChildren(icon(name));
}

/** Return facts in small print, each of them on one line; empty and repeated ones are left out. */
export function about(facts) {
  const shown = [...new Set(facts.filter(Boolean))];
  return h('span', { class: 'about' }, shown.map((fact, i) => [i > 0 && ' · ', h('span', { class: 'nowrap' }, fact)]));
}

/** Return a whole number with commas: "1,234". */
export function count(n) {
  return n === null || n === undefined ? '–' : Math.round(n).toLocaleString('en-US');
}

/** Return "1 sample" or "1,234 samples". */
export function counted(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

/** Return a number as text, with at most `digits` digits for fractions. */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return '–';
  if (typeof value !== 'number') return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString('en-US');
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2));
  return String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size))))));
}

/** Return a number of bytes in the largest binary unit in which it is at least 1. */
export function bytes(n) {
  if (n === null || n === undefined) return '–';
  for (const unit of ['bytes', 'KiB', 'MiB', 'GiB']) {
    if (n < 1024) return unit === 'bytes' ? `${count(n)} bytes` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}

/** Return seconds as "0:07.24", or "1:02:03.5" with the digits asked for. */
export function clockText(seconds, digits = 2) {
  if (!Number.isFinite(seconds)) return '–';
  const scale = 10 ** digits;
  const whole = Math.round(Math.max(0, seconds) * scale) / scale;
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  const rest = (whole % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, '0');
  return hours ? `${hours}:${String(minutes).padStart(2, '0')}:${rest}` : `${minutes}:${rest}`;
}

/** Return a shape as text: "480 × 640 × 3"; null is a dimension that varies. */
export function shapeText(shape) {
  if (shape === null || shape === undefined) return '';
  if (typeof shape === 'string') return shape;
  return shape.length ? shape.map((n) => (n === null || n === -1 ? 'any' : String(n))).join(' × ') : 'scalar';
}

/** Return a point in time as "2026-11-27 14:05" if it can be parsed, or else its text. */
export function when(value) {
  if (value === null || value === undefined || value === '') return '–';
  const date = typeof value === 'number' ? new Date(value * 1000) : new Date(value);
  if (Number.isNaN(date.getTime())) return String(value);
  const two = (n) => String(n).padStart(2, '0');
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

let toastTimer = 0;

/** Show a short message at the foot of the page, read out by screen readers. */
export function toast(text, isError = false) {
  const node = document.getElementById('toast');
  node.textContent = text;
  node.classList.toggle('bad', isError);
  node.classList.add('shown');
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => node.classList.remove('shown'), isError ? 8000 : 3000);
}

/** Return the box that shows an error, with its hint and a button to retry if `retry` is given. */
export function errorBox(error, retry = null) {
  return h('div', { class: 'notice bad', role: 'alert' },
    h('p', {}, error.message), error.hint && h('p', { class: 'hint' }, error.hint),
    retry && h('p', {}, h('button', { type: 'button', onclick: retry }, 'Try again')));
}

/** Return a progress bar; `value` is null while nothing is known. */
export function progressBar(value, label) {
  const bar = h('div', { class: value === null ? 'progress unknown' : 'progress', role: 'progressbar', 'aria-label': label,
    'aria-valuemin': 0, 'aria-valuemax': 100, 'aria-valuenow': value === null ? null : Math.round(value * 100) });
  bar.append(h('span', { style: value === null ? {} : { width: `${Math.max(0, Math.min(1, value)) * 100}%` } }));
  return bar;
}

/** Return a function that calls `run` once, `ms` after its last call. */
export function debounced(run, ms) {
  let timer = 0;
  const later = (...args) => { clearTimeout(timer); timer = setTimeout(() => run(...args), ms); };
  later.cancel = () => clearTimeout(timer);
  return later;
}

/** Move the focus among the items of a toolbar-like group by arrows, Home and End: one tab stop. */
export function roving(group, selector) {
  const items = () => [...group.querySelectorAll(selector)];
  const choose = (item, focus) => {
    for (const each of items()) each.tabIndex = each === item ? 0 : -1;
    if (focus) item.focus();
  };
  const first = items()[0];
  if (first) choose(first, false);
  group.addEventListener('focusin', (event) => { if (items().includes(event.target)) choose(event.target, false); });
  group.addEventListener('keydown', (event) => {
    const all = items();
    const at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (all[to]) choose(all[to], true);
  });
}
