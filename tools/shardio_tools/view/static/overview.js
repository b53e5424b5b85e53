/** The overview: what is in the dataset, where it came from, and how its values are distributed. */

import { h, fill, bytes, count, counted, number, shapeText, when, errorBox, progressBar, toast } from './dom.js';
import { api, isStatic } from './api.js';
import { bars, histogram } from './bars.js';
import { link } from './route.js';
import { store, loadDataset, withoutPath } from './store.js';

const POLL_MS = 700;
const PROGRESS = /^[\d,]+ of [\d,]+ \w+$/; // "2 of 2 shards": nothing is missing

export function show(root, route, signal) {
  const data = store.dataset;
  const statistics = h('div', { class: 'statistics' });
  const classes = h('div', { class: 'classes' });
  const strip = h('ul', { class: 'strip', hidden: true, 'aria-label': 'The first samples' });
  const fields = h('div', {});
  const later = h('div', {});
  fill(root, head(data), strip, problems(data), fields,
    h('div', { class: 'columns' },
      h('div', {}, section('Distributions', 'of numbers and lengths', statistics)),
      h('div', {}, data.classes.length > 0 && section('Classes', `${counted(data.classes.length, 'class', 'classes')}${data.subsets?.length ? ', in all samples' : ''}`, classes), subsets(data))),
    later);
  let drawn = null;
  const draw = (sizes) => {
    if (JSON.stringify(sizes) === drawn) return;
    drawn = JSON.stringify(sizes);
    fill(fields, fieldsTable(store.dataset, sizes));
  };
  draw({});
  fill(later, conversion(data), generations(data));
  showClasses(classes, data, null);
  showStrip(strip, data, signal);
  watch(statistics, classes, draw, signal);
  if (data.pending) waitForHistory(later, signal);
  return {};
}

function section(title, about, ...content) {
  return h('section', { class: 'section', 'aria-label': title }, h('header', {}, h('h2', {}, title), about && h('span', { class: 'muted' }, about)), content);
}

function head(data) {
  const fact = (name, value) => value !== null && h('div', {}, h('dt', {}, name), ' ', h('dd', {}, value));
  return h('header', {}, h('h1', {}, data.name), h('p', { class: 'lead mono' }, data.path),
    h('dl', { class: 'facts' },
      fact('samples', count(data.n_samples)), fact('shards', count(data.n_shards)), fact('on disk', bytes(data.n_bytes)),
      fact('view', data.view && data.view.kind !== 'rows' ? data.view.text : null), fact('loader', data.loader?.name ?? null),
      fact('generation', data.generation ? count(data.generation) : null),
      fact('opened', data.remote ? 'by range reads' : null),
      fact('exported', isStatic ? count(data.exported) : null),
      !isStatic && fact('access', data.writable ? 'marks can be saved' : 'read-only')));
}

function problems(data) {
  if (!data.problems?.length) return null;
  return h('div', { class: 'notice bad' }, h('p', {}, 'The dataset opens only in part:'), h('ul', {}, data.problems.map((text) => h('li', {}, text))),
    !isStatic && h('p', {}, h('a', { href: '#/damage' }, 'Verify it'), ' to see which samples are damaged.'));
}

/** Show the first samples that have pictures. */
async function showStrip(node, data, signal) {
  if (!data.fields.some((field) => field.image || field.video)) return;
  try {
    const found = await api.rows(0, 16, {}, signal);
    const pictured = found.rows.filter((row) => row.image && !row.damaged);
    fill(node, pictured.map((row) => h('li', {}, h('a', { href: link('sample', row.row), 'aria-label': row.title || `sample ${row.row}`, title: row.title }, h('img', { src: api.thumbnail(row, 192), alt: '', loading: 'lazy' })))));
    node.hidden = !pictured.length;
  } catch { /* the grid says what is wrong */ }
}

/** Ask again until the history and the report of the conversion have been read. */
async function waitForHistory(node, signal) {
  while (!signal.aborted && store.dataset.pending) {
    await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
    if (signal.aborted) return;
    try { await loadDataset(); } catch { return; }
  }
  if (!signal.aborted) fill(node, conversion(store.dataset), generations(store.dataset));
}

function fieldsTable(data, sizes) {
  data = { ...data, fields: data.fields.map((field) => ({ ...field, n_bytes: field.n_bytes ?? sizes[field.name] ?? null })) };
  const most = Math.max(1, ...data.fields.map((field) => field.n_bytes ?? 0));
  const total = data.fields.reduce((sum, field) => sum + (field.n_bytes ?? 0), 0);
  const hasCodec = data.fields.some((field) => field.codec);
  return section('Fields', counted(data.fields.length, 'field'), h('div', { class: 'table', tabindex: 0, role: 'region', 'aria-label': 'Fields' },
    h('table', {}, h('thead', {}, h('tr', {}, ['Name', 'Type', 'Shape'].map((name) => h('th', { scope: 'col' }, name)), hasCodec && h('th', { class: 'wide-only', scope: 'col' }, 'Stored as'), h('th', { class: 'right', scope: 'col' }, 'Size'))),
      h('tbody', {}, data.fields.map((field) => h('tr', {},
        h('td', { class: 'name' }, field.name), h('td', { title: field.type }, typeName(field)), h('td', { class: 'nowrap' }, shapeText(field.shape)),
        hasCodec && h('td', { class: 'wide-only' }, field.codec ?? ''),
        h('td', { class: 'right nowrap' }, bytes(field.n_bytes),
          h('span', { class: 'meter', title: total ? `${((field.n_bytes ?? 0) / total * 100).toFixed(1)} % of all fields` : null }, h('span', { style: { width: `${((field.n_bytes ?? 0) / most) * 100}%` } })))))))));
}

/** Return the type without its arguments: "Array int64, optional". */
function typeName(field) {
  return `${field.type.split('(')[0]}${field.dtype ? ` ${field.dtype}` : ''}${field.optional ? ', optional' : ''}`;
}

function showClasses(node, data, counts) {
  const items = data.classes.map((each, i) => ({ name: each.name, n: counts?.[i] ?? each.count, href: link('grid', null, { class: i }) }));
  fill(node, bars(items, 'Samples of each class'));
}

function subsets(data) {
  if (!data.subsets?.length) return null;
  return section('Subsets', counted(data.subsets.length, 'subset'),
    bars(data.subsets.map((each) => ({ name: each.name, n: each.n, href: link('grid', null, { subset: each.name }) })), 'Samples of each subset'));
}

function generations(data) {
  if (!data.generations?.length) return null;
  return section('History', counted(data.generations.length, 'generation'), h('div', { class: 'table', tabindex: 0, role: 'region', 'aria-label': 'History' }, h('table', {},
    h('thead', {}, h('tr', {}, h('th', { class: 'right' }, 'Generation'), h('th', {}, 'When'), h('th', {}, 'What'), h('th', { class: 'right' }, 'Samples'))),
    h('tbody', {}, data.generations.map((each) => h('tr', {}, h('td', { class: 'right' }, count(each.number)), h('td', { class: 'nowrap' }, when(each.when)),
      h('td', {}, each.what ?? '', each.number === data.generation && h('span', { class: 'muted' }, ' (shown)')), h('td', { class: 'right' }, count(each.n_samples))))))));
}

function conversion(data) {
  const report = data.conversion;
  if (!report) return null;
  const n = report.n_failed ?? report.failed.length;
  return section('Conversion', n ? `${counted(n, 'input')} without samples` : 'each input has samples', report.text && h('p', {}, report.text),
    report.failed.length > 0 && h('div', { class: 'table', tabindex: 0, role: 'region', 'aria-label': 'Inputs without samples' }, h('table', {}, h('thead', {}, h('tr', {}, h('th', {}, 'Input'), h('th', {}, 'Why'))),
      h('tbody', {}, report.failed.map((each) => h('tr', {}, h('td', { class: 'mono' }, each.input), h('td', {}, each.reason)))))),
    report.failed.length > 0 && n > report.failed.length && h('p', { class: 'muted' }, `… and ${count(n - report.failed.length)} more`));
}

/** Show the statistics, and while they are computed, their progress. */
async function watch(node, classes, draw, signal) {
  let error = null;
  const again = () => watch(node, classes, draw, signal);
  const start = async () => {
    try { await api.startStatistics(); } catch (caught) { toast(`${caught.message} ${caught.hint ?? ''}`, true); }
    again();
  };
  fill(node, h('p', { class: 'muted', 'aria-busy': 'true' }, 'Reading the statistics …'));
  while (!signal.aborted) {
    let found;
    try { found = await api.statistics(signal); } catch (caught) { error = caught; break; }
    if (found.classes?.length) showClasses(classes, store.dataset, found.classes);
    draw(Object.fromEntries(Object.entries(found.fields ?? {}).map(([name, each]) => [name, each.n_bytes ?? null])));
    fill(node, statisticsOf(found, start));
    if (found.state !== 'running') return;
    await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
  }
  if (error && error.name !== 'AbortError') fill(node, errorBox(error, again));
}

function statisticsOf(found, start) {
  const shown = [];
  if (found.state === 'running') {
    shown.push(h('div', { class: 'job' }, h('span', {}, found.text || 'Computing statistics …'), progressBar(found.progress ?? null, 'Statistics')));
  } else if (found.state === 'failed') {
    shown.push(h('div', { class: 'notice bad' }, h('p', {}, found.text || 'The statistics could not be computed.'), h('p', {}, h('button', { type: 'button', onclick: start }, 'Compute again'))));
  } else if (found.state === 'none') {
    shown.push(h('p', { class: 'muted' }, found.text || 'No statistics are kept with this dataset.'), !isStatic && h('p', {}, h('button', { type: 'button', onclick: start }, 'Compute statistics')));
  }
  const fields = new Map(store.dataset.fields.map((field) => [field.name, field]));
  const plots = [];
  const constants = []; // a single bar would show nothing
  for (const [name, each] of Object.entries(found.fields ?? {})) {
    const field = fields.get(name);
    const stats = [each.mean !== null && each.mean !== undefined && `mean ${number(each.mean, 3)}`, each.std !== null && each.std !== undefined && `± ${number(each.std, 3)}`].filter(Boolean).join(' ');
    const { lengths } = each;
    if (each.count && each.min === each.max) constants.push(`${name} = ${number(each.min)}`);
    else if (each.histogram?.counts?.length) {
      plots.push(histogram({ title: name, ...each.histogram, stats, href: field?.sortable ? (low, high) => link('grid', null, { range: `${name}:${low}:${high}`, sort: name }) : null }));
    }
    if (lengths?.count && lengths.min === lengths.max) constants.push(`length of ${name} = ${number(lengths.min)}`);
    else if (lengths?.counts?.length) plots.push(histogram({ title: `length of ${name}`, edges: lengths.edges, counts: lengths.counts, stats: lengths.mean ? `mean ${number(lengths.mean, 3)}` : '', unit: 'sample' }));
  }
  if (constants.length) shown.push(h('p', { class: 'constants' }, 'Constant: ', constants.join(', '), '.'));
  if (plots.length) shown.push(h('div', { class: 'histograms' }, plots), found.state === 'done' && found.text && !PROGRESS.test(found.text) && h('p', { class: 'muted extent' }, withoutPath(found.text)));
  else if (!constants.length && (found.state === 'kept' || found.state === 'done')) shown.push(h('p', { class: 'muted' }, 'No field has numbers or lengths to show.'));
  return shown;
}
