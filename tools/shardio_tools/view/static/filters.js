/** The panel with filters, and the chips of those in use. Each change goes to the URL. */

import { h, fill, icon, iconButton, setIcon, count, counted, number } from './dom.js';
import { api, splitRange, splitText } from './api.js';
import { histogram } from './bars.js';
import { store } from './store.js';

const MAX_CHOICES = 200;
const RETRY_MS = 1500;
let statistics = null;

/** Return the filters in words, one `{key, text}` each. */
export function describe(filters) {
  const found = [];
  if (filters.class) found.push({ key: 'class', text: store.dataset.classes[Number(filters.class)]?.name ?? `class ${filters.class}` });
  if (filters.subset) found.push({ key: 'subset', text: `subset ${filters.subset}` });
  if (filters.range) {
    const [field, low, high] = splitRange(filters.range);
    const text = low === '' ? `${field} ≤ ${number(Number(high))}` : high === '' ? `${field} ≥ ${number(Number(low))}` : `${number(Number(low))} ≤ ${field} ≤ ${number(Number(high))}`;
    found.push({ key: 'range', text });
  }
  if (filters.text) { const [field, words] = splitText(filters.text, store.dataset.fields); found.push({ key: 'text', text: `${field} has “${words}”` }); }
  if (filters.sort) found.push({ key: 'sort', text: `by ${filters.sort}${filters.desc ? ', descending' : ''}` });
  return found;
}

/** Return the chips of filters; `change(part)` merges a change into them. */
export function chips(filters, change) {
  return describe(filters).map(({ key, text }) => h('button', { type: 'button', class: 'chip', 'aria-label': `Remove the filter: ${text}`, title: text,
    onclick: () => change({ [key]: null, ...(key === 'sort' ? { desc: null } : {}) }) }, h('span', {}, text), icon('close')));
}

export class FilterPanel {
  constructor(filters, change, close) {
    this.change = change;
    this.filters = filters;
    const data = store.dataset;
    this.sortable = data.fields.filter((field) => field.sortable).map((field) => field.name);
    this.searchable = data.fields.filter((field) => field.searchable).map((field) => field.name);
    this.parts = [];
    this.classes = data.classes.map((each, i) => ({ value: String(i), name: each.name, n: each.count }));
    this.element = h('aside', { class: 'filters', id: 'filters', 'aria-label': 'Filters' },
      h('div', { class: 'pair only-narrow' }, h('h2', {}, 'Filters'), h('span', { class: 'fixed' }, iconButton('close', 'Close the filters', close))),
      this.textPart(), this.choicePart('class', 'Class', this.classes),
      this.choicePart('subset', 'Subset', data.subsets.map((each) => ({ value: each.name, name: each.name, n: each.n }))),
      this.rangePart(), this.sortPart(), this.done = h('button', { type: 'button', class: 'primary only-narrow', onclick: close }, 'Show the samples'));
    this.update(filters);
    this.readStatistics();
  }

  /** Fill in the counts of classes and the plot of the range, once they are known. */
  async readStatistics() {
    try { statistics ??= await api.statistics(); } catch { return; } // filters work without
    if (statistics.state === 'running') {
      statistics = null;
      setTimeout(() => { if (this.element.isConnected) this.readStatistics(); }, RETRY_MS);
      return;
    }
    this.countClasses();
    this.plotRange?.();
  }

  /** Show other filters. */
  update(filters) {
    this.filters = filters;
    for (const part of this.parts) part(filters);
    this.countClasses();
  }

  /** Show how many samples each class has, in the subset if one is chosen, once that is known. */
  async countClasses() {
    const { subset } = this.filters;
    if (!this.classes.length || (subset && this.countedSubset === subset)) return;
    this.countedSubset = subset;
    this.showCounts(subset ? [] : statistics?.classes);
    if (!subset) return;
    let found;
    try { found = await api.classes(subset); } catch { return; } // filters work without
    if (this.countedSubset !== subset) return;
    this.showCounts(found.classes);
    if (found.state !== 'running') return;
    this.countedSubset = null;
    setTimeout(() => { if (this.element.isConnected) this.countClasses(); }, RETRY_MS);
  }

  showCounts(counts) {
    for (const [i, each] of this.classes.entries()) each.n = counts?.[i] ?? (this.filters.subset ? null : store.dataset.classes[i].count);
    this.element.querySelector('[data-legend=class]').textContent = this.filters.subset ? ` in ${this.filters.subset}` : '';
    for (const button of this.element.querySelectorAll('[data-key=class] button')) {
      const { n } = this.classes[Number(button.dataset.value)];
      button.querySelector('.n').textContent = n === null ? '' : count(n);
    }
  }

  /** Say on the button that closes the panel how many samples there are. */
  showCount(n) { this.done.textContent = `Show ${counted(n, 'sample')}`; }

  /** Put the focus where a search begins. */
  focus() {
    const target = this.element.querySelector('input[type=search]') ?? this.element.querySelector('button:not(.icon-button), select, input');
    target?.focus();
    target?.select?.();
  }

  textPart() {
    if (!this.searchable.length) return null;
    const field = select('Text field to search', this.searchable);
    const words = h('input', { type: 'search', 'aria-label': 'Words to find', placeholder: 'Find text', autocomplete: 'off', maxlength: 200 });
    const apply = () => {
      const text = words.value.trim();
      const value = text ? `${field.value}:${text}` : null;
      if (value !== (this.filters.text ?? null)) this.change({ text: value });
    };
    words.addEventListener('change', apply);
    words.addEventListener('search', apply);
    words.addEventListener('keydown', (event) => { if (event.key === 'Enter') apply(); });
    field.addEventListener('change', apply);
    this.parts.push((filters) => {
      const [name, value] = splitText(filters.text, store.dataset.fields);
      if (name) field.value = name;
      if (document.activeElement !== words || filters.text) words.value = value ?? '';
    });
    return h('fieldset', {}, h('legend', {}, 'Text'), words, this.searchable.length > 1 && field);
  }

  choicePart(key, title, choices) {
    if (!choices.length) return null;
    const list = h('ul', { class: 'choices', 'data-key': key });
    const show = (words) => {
      const found = words ? choices.filter((each) => each.name.toLowerCase().includes(words)) : choices;
      fill(list, found.slice(0, MAX_CHOICES).map((each) => h('li', {}, h('button', { type: 'button', title: each.name, 'aria-pressed': String(this.filters[key] === each.value), 'data-value': each.value,
        onclick: () => this.change({ [key]: this.filters[key] === each.value ? null : each.value }) }, h('span', {}, each.name), h('span', { class: 'n' }, each.n === null ? '' : count(each.n))))),
      found.length > MAX_CHOICES && h('li', { class: 'muted' }, `… ${count(found.length - MAX_CHOICES)} more: type a name`), !found.length && h('li', { class: 'muted' }, 'No such name.'));
    };
    show('');
    this.parts.push((filters) => {
      for (const button of list.querySelectorAll('button')) button.setAttribute('aria-pressed', String(filters[key] === button.dataset.value));
    });
    const find = choices.length > 12 && h('input', { type: 'text', placeholder: `Find a ${title.toLowerCase()}`, 'aria-label': `Find a ${title.toLowerCase()}`, autocomplete: 'off', oninput: (event) => show(event.target.value.trim().toLowerCase()) });
    return h('fieldset', {}, h('legend', {}, title, h('span', { class: 'muted', 'data-legend': key })), find, list);
  }

  rangePart() {
    const { classes, class_field: label } = store.dataset;
    const fields = this.sortable.filter((name) => name !== label || !classes.length); // labels are chosen as classes
    if (!fields.length) return null;
    const field = select('Field of the range', fields);
    const low = h('input', { type: 'text', inputmode: 'decimal', 'aria-label': 'Lowest value', placeholder: 'from', autocomplete: 'off' });
    const high = h('input', { type: 'text', inputmode: 'decimal', 'aria-label': 'Highest value', placeholder: 'to', autocomplete: 'off' });
    const plot = h('div', {});
    const valid = (input) => {
      const ok = input.value.trim() === '' || Number.isFinite(Number(input.value));
      input.setAttribute('aria-invalid', String(!ok));
      return ok;
    };
    const apply = () => {
      if (!valid(low) || !valid(high)) return;
      const [from, to] = [low.value.trim(), high.value.trim()];
      const value = from || to ? `${field.value}:${from}:${to}` : null;
      if (value !== (this.filters.range ?? null)) this.change({ range: value });
    };
    const draw = () => {
      const each = statistics?.fields?.[field.value]?.histogram;
      const [name, from, to] = splitRange(this.filters.range);
      fill(plot, each?.counts?.length > 1 && histogram({ title: '', ...each, inside: name === field.value ? (a, b) => (from === '' || b > Number(from)) && (to === '' || a < Number(to)) : null }));
      for (const [i, bar] of [...plot.querySelectorAll('.bar-of')].entries()) {
        const set = () => { low.value = String(each.edges[i]); high.value = String(each.edges[i + 1]); apply(); };
        bar.setAttribute('role', 'button');
        bar.addEventListener('click', set);
        bar.addEventListener('keydown', (event) => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); set(); } });
      }
    };
    for (const input of [low, high]) {
      input.addEventListener('change', apply);
      input.addEventListener('keydown', (event) => { if (event.key === 'Enter') apply(); });
    }
    field.addEventListener('change', () => { low.value = ''; high.value = ''; draw(); apply(); });
    this.parts.push((filters) => {
      const [name, from, to] = splitRange(filters.range);
      if (name) field.value = name;
      low.value = from ?? '';
      high.value = to ?? '';
      draw();
    });
    this.plotRange = draw;
    return h('fieldset', {}, h('legend', {}, 'Range'), field, plot, h('div', { class: 'pair' }, low, h('span', { class: 'fixed muted' }, '–'), high));
  }

  sortPart() {
    const field = select('Sort by', ['', ...this.sortable], 'stored order');
    const order = h('button', { type: 'button', class: 'icon-button fixed' });
    const apply = () => this.change({ sort: field.value || null, desc: this.filters.desc ?? null });
    field.addEventListener('change', apply);
    order.addEventListener('click', () => this.change({ desc: this.filters.desc ? null : '1' }));
    this.parts.push((filters) => { field.value = filters.sort ?? ''; setIcon(order, filters.desc ? 'down' : 'up', filters.desc ? 'Descending: sort ascending' : 'Ascending: sort descending'); });
    return h('fieldset', {}, h('legend', {}, 'Order'), h('div', { class: 'pair' }, field, order));
  }
}

function select(label, values, empty = '') {
  return h('select', { 'aria-label': label }, values.map((value) => h('option', { value }, value === '' ? empty : value)));
}
