/** One field of a sample: a renderer for each kind of value. */

import { h, fill, icon, about, bytes, count, number, shapeText, clockText } from './dom.js';
import { lineChart, waveform, heatMap } from './charts.js';

const WIDE = new Set(['image', 'audio', 'array']);
const MAX_CHILDREN = 200;
const MAX_LINES = 16;

/** True if a field needs the wide column. */
export const isWide = (field) => WIDE.has(field.kind) && !(field.kind === 'array' && !field.series && !field.heatmap && !field.image);

/** Return the section of a field; `clock` may be null. */
export function fieldSection(field, clock, signal) {
  const isNumbers = Boolean(field.dtype);
  const facts = [!isNumbers && field.type, field.dtype, field.kind === 'tokens' ? `${count(field.n)} tokens` : field.shape?.length > 0 && shapeText(field.shape), field.kind === 'audio' && field.rate && `${count(field.rate)} Hz`, field.kind === 'audio' && field.channels && `${field.channels} ch`,
    field.kind === 'audio' && clockText(field.seconds),
    field.kind === 'array' && field.min !== null && field.min !== undefined && `${number(field.min)} to ${number(field.max)}`, field.kind !== 'scalar' && field.n_bytes !== null && field.n_bytes !== undefined && bytes(field.n_bytes)];
  const found = field.damaged ? h('div', { class: 'notice bad' }, h('p', {}, field.damaged)) : field.missing ? h('p', { class: 'muted' }, 'no value') : (KINDS[field.kind] ?? other)(field, clock, signal);
  const content = [found].flat(Infinity).filter(Boolean);
  const isControl = (node) => node instanceof Element && node.classList.contains('in-header');
  return h('section', { class: 'field', 'data-field': field.name, 'data-kind': field.kind, 'aria-label': field.name },
    h('header', {}, h('div', {}, h('h2', {}, field.name), ' ', about(facts)),
      content.filter(isControl), download(field)), content.filter((node) => !isControl(node)));
}

/** Return the link to the stored bytes of a field. */
export function download(field) {
  return field.original && h('a', { class: 'get', href: field.original, download: '', 'aria-label': `Download ${field.name}`, title: 'Download the stored bytes' }, icon('download'));
}

const KINDS = {
  scalar: (field) => h('p', { class: 'value' }, typeof field.value === 'number' ? number(field.value, 8) : String(field.value ?? '–'), field.label && h('span', { class: 'muted' }, ` ${field.label}`)),
  text: (field) => [h('div', { class: 'text-value', tabindex: 0, role: 'region', 'aria-label': `Text of ${field.name}` }, field.value), field.truncated && h('p', { class: 'muted' }, 'Shortened: download the whole text.')],
  json: (field) => [h('div', { class: 'tree', tabindex: 0, role: 'region', 'aria-label': `JSON of ${field.name}` }, branch(null, field.value, 0)), field.truncated && h('p', { class: 'muted' }, 'Shortened: download the whole value.')],
  tokens: (field) => [field.text && h('div', { class: 'text-value', tabindex: 0, role: 'region', 'aria-label': 'Decoded tokens' }, field.text),
    h('div', { class: 'tokens', tabindex: 0, role: 'region', 'aria-label': 'Token ids' }, field.value.map((token, i) => h('span', { title: `token ${count(i)}` }, String(token)))),
    field.truncated && h('p', { class: 'muted' }, `The first ${count(field.value.length)} of ${count(field.n)} tokens.`)],
  list: (field) => [h('div', { class: 'preview', tabindex: 0, role: 'region', 'aria-label': `Items of ${field.name}` }, field.items.map((each, i) => h('div', {}, h('span', { class: 'muted' }, `${i}  ${shapeText(each.shape)}  `), each.preview.map((n) => number(n)).join(', ')))),
    !field.n && h('p', { class: 'muted' }, 'empty'), field.truncated && h('p', { class: 'muted' }, `The first ${count(field.items.length)} of ${count(field.n)} items.`)],
  bytes: (field) => [field.image && zoomable(field.image, null, null, field.name), hexDump(field.hex), field.n_bytes > field.hex.length / 2 && h('p', { class: 'muted' }, `The first ${count(field.hex.length / 2)} of ${count(field.n_bytes)} bytes.`)],
  image: (field) => zoomable(field.src, field.width, field.height, field.name),
  audio: (field, clock, signal) => field.waveform && waveform(field, clock, signal),
  array: (field, clock, signal) => [
    field.image && zoomable(field.image, field.width ?? null, field.height ?? null, field.name),
    field.series || field.heatmap ? plots(field, clock, signal) : null,
    !field.series && !field.heatmap && !field.image && h('pre', { class: 'preview', tabindex: 0 }, preview(field))],
  video: () => null,
};

/** Return an array's lines, its heat map, or a choice of both: many columns begin as a heat map. */
function plots(field, clock, signal) {
  if (!field.series || !field.heatmap) return field.series ? lineChart(field, clock, signal) : heatMap(field, signal);
  const node = h('div', {});
  const choose = (isMap) => {
    fill(node, isMap ? heatMap(field, signal) : lineChart(field, clock, signal));
    lines.setAttribute('aria-pressed', String(!isMap));
    map.setAttribute('aria-pressed', String(isMap));
  };
  const lines = h('button', { type: 'button', onclick: () => choose(false) }, 'Lines');
  const map = h('button', { type: 'button', onclick: () => choose(true) }, 'Heat map');
  choose((field.shape?.[1] ?? 0) > MAX_LINES);
  return [node, h('div', { class: 'segmented small in-header', role: 'group', 'aria-label': `Show ${field.name} as` }, lines, map)];
}

function other(field) {
  return h('p', { class: 'value' }, String(field.value ?? field.preview ?? '–'));
}

function preview(field) {
  const value = field.preview ?? field.value;
  return typeof value === 'string' ? value : JSON.stringify(value);
}

/** Return a JSON value as a tree: branches are built when they are opened. */
function branch(key, value, depth) {
  const name = key === null ? '' : h('span', { class: 'key' }, `${key}: `);
  if (value === null || typeof value !== 'object') {
    const kind = typeof value === 'string' ? 'string' : typeof value === 'number' ? 'number' : 'other';
    return h('div', { class: 'leaf' }, name, h('span', { class: kind }, typeof value === 'string' ? JSON.stringify(value) : String(value)));
  }
  const entries = Array.isArray(value) ? value.map((each, i) => [String(i), each]) : Object.entries(value);
  const summary = Array.isArray(value) ? `[${count(entries.length)}]` : `{${count(entries.length)}}`;
  const node = h('details', {}, h('summary', {}, name, h('span', { class: 'muted' }, summary)));
  let start = 0;
  const more = () => {
    node.querySelector(':scope > button')?.remove();
    node.append(...entries.slice(start, start + MAX_CHILDREN).map(([each, child]) => branch(each, child, depth + 1)));
    start += MAX_CHILDREN;
    if (start < entries.length) node.append(h('button', { type: 'button', class: 'plain', onclick: more }, `${count(entries.length - start)} more`));
  };
  node.addEventListener('toggle', () => { if (node.open && start === 0) more(); });
  if (depth < 2 && entries.length <= 50) { node.open = true; more(); }
  return node;
}

/** Return bytes as offset, hexadecimal and text, 8 a line, which fits beside pictures. */
function hexDump(hex) {
  const node = h('div', { class: 'hex', tabindex: 0, role: 'region', 'aria-label': 'Bytes in hexadecimal' });
  for (let at = 0; at < hex.length; at += 16) {
    const pairs = hex.slice(at, at + 16).match(/../g) ?? [];
    const text = pairs.map((pair) => { const code = parseInt(pair, 16); return code > 31 && code < 127 ? String.fromCharCode(code) : '·'; }).join('');
    node.append(h('span', { class: 'offset' }, `${(at / 2).toString(16).padStart(4, '0')}  `), `${pairs.join(' ').padEnd(23)}  `, h('span', { class: 'ascii' }, `${text}\n`));
  }
  return node;
}

/** Return a picture that can be enlarged and moved: by buttons, keys, wheel (with Ctrl) and pointer. */
function zoomable(src, width, height, name) {
  const image = h('img', { alt: name, draggable: 'false' });
  const stage = h('div', { class: 'stage zoom', tabindex: 0, role: 'group', 'aria-label': `Picture ${name}: plus and minus zoom, 0 fits` }, image);
  const state = h('span', { class: 'muted', role: 'status' });
  let [scale, x, y, fitted] = [1, 0, 0, true];
  const largest = () => Math.max(2, Math.floor(480 / image.naturalWidth)); // small pictures are enlarged to be seen
  const fitScale = () => Math.min(stage.clientWidth / image.naturalWidth, stage.clientHeight / image.naturalHeight, largest());
  const place = () => {
    if (!image.naturalWidth) return;
    if (fitted) scale = fitScale();
    const [w, t] = [image.naturalWidth * scale, image.naturalHeight * scale];
    x = w <= stage.clientWidth ? (stage.clientWidth - w) / 2 : Math.min(0, Math.max(stage.clientWidth - w, x));
    y = t <= stage.clientHeight ? (stage.clientHeight - t) / 2 : Math.min(0, Math.max(stage.clientHeight - t, y));
    image.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
    image.classList.toggle('pixels', scale >= 3);
    stage.style.touchAction = fitted ? 'pan-y' : 'none'; // a finger scrolls the page until the picture is enlarged
    state.textContent = `${width ?? image.naturalWidth} × ${height ?? image.naturalHeight} at ${Math.round(scale * 100)} %`;
  };
  const zoom = (factor, at = [stage.clientWidth / 2, stage.clientHeight / 2]) => {
    const next = Math.max(Math.min(fitScale(), 1) / 2, Math.min(40, scale * factor));
    x = at[0] - ((at[0] - x) / scale) * next;
    y = at[1] - ((at[1] - y) / scale) * next;
    [scale, fitted] = [next, false];
    place();
  };
  const fit = () => { fitted = true; place(); };
  const actual = () => { zoom(1 / scale); };
  const where = (event) => { const box = stage.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  image.addEventListener('load', () => {
    stage.style.height = `${Math.min(560, Math.max(120, image.naturalHeight * Math.min(largest(), stage.clientWidth / image.naturalWidth)))}px`;
    fit();
  });
  image.addEventListener('error', () => fill(stage, h('p', { class: 'how bad' }, 'The picture cannot be decoded.')));
  image.src = src;
  stage.addEventListener('wheel', (event) => { if (event.ctrlKey) { event.preventDefault(); zoom(Math.exp(-event.deltaY / 200), where(event)); } }, { passive: false });
  stage.addEventListener('dblclick', (event) => { if (fitted) zoom(Math.max(2, 1 / scale), where(event)); else fit(); });
  stage.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    stage.setPointerCapture(event.pointerId);
    let last = [event.clientX, event.clientY];
    const move = (each) => { x += each.clientX - last[0]; y += each.clientY - last[1]; last = [each.clientX, each.clientY]; place(); };
    stage.addEventListener('pointermove', move);
    const end = () => stage.removeEventListener('pointermove', move);
    stage.addEventListener('pointerup', end, { once: true });
    stage.addEventListener('pointercancel', end, { once: true });
  });
  stage.addEventListener('keydown', (event) => {
    if (event.key === '+' || event.key === '=') zoom(1.4); else if (event.key === '-') zoom(1 / 1.4); else if (event.key === '0') fit(); else return;
    event.preventDefault();
    event.stopPropagation();
  });
  new ResizeObserver(place).observe(stage);
  return [stage, h('div', { class: 'zoom-tools', role: 'group', 'aria-label': `Zoom of ${name}` }, h('button', { type: 'button', onclick: fit }, 'Fit'), h('button', { type: 'button', onclick: actual }, '1:1'),
    h('button', { type: 'button', 'aria-label': 'Zoom out', onclick: () => zoom(1 / 1.4) }, '−'), h('button', { type: 'button', 'aria-label': 'Zoom in', onclick: () => zoom(1.4) }, '+'), state)];
}
