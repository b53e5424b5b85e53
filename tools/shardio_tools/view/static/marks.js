/** Marks: the marked samples with their notes, saved as a named subset. */

import { h, fill, icon, iconButton, count, counted, toast } from './dom.js';
import { api } from './api.js';
import { link } from './route.js';
import { store, setMark, onMarks, loadDataset } from './store.js';

const MAX_SHOWN = 500;

export function show(root, route, signal) {
  const node = h('div', {});
  const image = store.dataset.fields.find((field) => field.image || field.video)?.name ?? null;
  fill(root, h('div', { class: 'heading' }, h('h1', {}, 'Marks')), node);
  const items = new Map();
  let saveForm = null;
  const draw = () => {
    const rows = [...store.marks.keys()].sort((a, b) => a - b);
    if (!rows.length) {
      saveForm = null;
      fill(node, h('div', { class: 'empty' }, icon('flag'), h('h2', {}, 'No sample is marked'), h('p', {}, 'Press ', h('kbd', {}, 'm'), ' on a sample to mark it, and ', h('kbd', {}, 'n'), ' to add a note. Marks can be saved as a subset, which a loader can use.')));
      return;
    }
    saveForm ??= form();
    const list = h('ul', { class: 'marks-list' }, rows.slice(0, MAX_SHOWN).map((row) => {
      if (!items.has(row)) items.set(row, item(row, image));
      return items.get(row);
    }));
    if (!node.contains(saveForm)) fill(node, saveForm, h('section', { class: 'section', 'aria-label': 'Marked samples' }, h('header', {}, h('h2', {}, 'Marked samples'), h('span', { class: 'muted n' })), h('div', { class: 'list' })));
    node.querySelector('.n').textContent = counted(rows.length, 'sample') + (rows.length > MAX_SHOWN ? `, the first ${MAX_SHOWN} shown` : '');
    const holder = node.querySelector('.list');
    if ([...holder.querySelectorAll('li')].map((each) => each.dataset.row).join() !== [...list.children].map((each) => each.dataset.row).join()) fill(holder, list);
  };
  draw();
  const stop = onMarks(draw);
  signal.addEventListener('abort', stop);
  return {};
}

function item(row, image) {
  const note = h('input', { type: 'text', value: store.marks.get(row) ?? '', placeholder: 'Note', 'aria-label': `Note of sample ${row}`, maxlength: 500, autocomplete: 'off', onchange: () => setMark(row, true, note.value.trim()) });
  const picture = image ? h('img', { src: api.thumbnail({ row, image }, 128), alt: '', loading: 'lazy' }) : h('span', { class: 'thumb' });
  picture.addEventListener('error', () => picture.replaceWith(h('span', { class: 'thumb' })));
  return h('li', { 'data-row': row }, h('a', { href: link('sample', row), tabindex: -1, 'aria-hidden': 'true' }, picture), h('a', { href: link('sample', row) }, `Sample ${count(row)}`), note, iconButton('close', `Remove the mark of sample ${row}`, () => setMark(row, false)));
}

function form() {
  const data = store.dataset;
  if (!data.writable) {
    return h('div', { class: 'notice' }, h('p', {}, 'Marks live as long as the viewer. To save them as a subset, start it with ', h('code', {}, `shardio view ${data.path} --writable`), '.'));
  }
  const name = h('input', { type: 'text', name: 'name', required: true, placeholder: 'keep', autocomplete: 'off', maxlength: 100 });
  const done = h('div', { role: 'status' });
  const button = h('button', { type: 'submit', class: 'primary' }, 'Save');
  const replace = h('input', { type: 'checkbox' });
  const save = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      const subset = name.value.trim();
      const n = store.marks.size;
      await api.saveMarks(subset, replace.checked);
      await loadDataset();
      fill(done, h('div', { class: 'notice' }, h('p', {}, `Saved ${counted(n, 'sample')} as the subset `, h('a', { href: link('grid', null, { subset }) }, subset), '. Load it with:'), h('p', {}, h('code', {}, `shardio.ShardLoader(shardio.open(${JSON.stringify(data.path)}).subset(${JSON.stringify(subset)}), batch_size=32)`))));
    } catch (error) { toast(`${error.message} ${error.hint ?? ''}`, true); }
    button.disabled = false;
  };
  return h('div', {}, h('form', { class: 'save', onsubmit: save }, h('label', {}, h('span', {}, 'Save as the subset'), name), button,
    h('label', { class: 'check' }, replace, h('span', {}, 'replace a subset of this name'))), done);
}
