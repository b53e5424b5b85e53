/** The samples: pictures or lines, as many as there are, of which only the visible ones exist. */

import { h, fill, icon, iconButton, count, counted, errorBox, progressBar, toast, debounced } from './dom.js';
import { api, isStatic } from './api.js';
import { link, go, replace, filtersOf } from './route.js';
import { store, toggleMark, onMarks, withoutPath } from './store.js';
import { Scroller } from './virtual.js';
import { Rows } from './rows.js';
import { FilterPanel, chips } from './filters.js';

const WIDTHS = [112, 160, 232, 340];
const LINE_HEIGHT = 36;
const IMAGE_DELAY_MS = 60;

export function show(root, route) {
  return new Grid(root, route);
}

class Grid {
  constructor(root, route) {
    this.nodes = new Map();
    this.cursor = 0;
    this.images = 0;
    this.scroller = new Scroller(() => this.draw(), 'Samples');
    this.scroller.onresize = () => this.layout(this.firstPosition);
    this.scroller.element.tabIndex = -1;
    this.scroller.element.style.setProperty('--row-width', `${0.7 * count(store.dataset.n_samples).length + 0.5}em`);
    this.read(route);
    this.panel = new FilterPanel(this.filters, (part) => this.change(part), () => this.openFilters(false));
    this.number = h('span', { class: 'n', role: 'status' });
    this.where = h('span', { class: 'where' });
    this.chips = h('div', { class: 'chips' });
    this.busy = h('div', {});
    this.problem = h('div', {});
    this.note = h('div', { role: 'status' });
    this.toggle = h('button', { type: 'button', class: 'filter-toggle', title: 'Filter (/)', 'aria-expanded': 'false', 'aria-controls': 'filters', onclick: () => this.openFilters(!this.panel.element.classList.contains('open')) }, icon('filter'), h('span', { class: 'visually-hidden' }, 'Filter'));
    this.modes = h('div', { class: 'segmented', role: 'group', 'aria-label': 'Show as' },
      h('button', { type: 'button', 'aria-label': 'Pictures', title: 'Pictures (v)', onclick: () => this.setView('grid') }, icon('grid')),
      h('button', { type: 'button', 'aria-label': 'List', title: 'List (v)', onclick: () => this.setView('list') }, icon('list')));
    fill(root, this.panel.element, h('section', { class: 'results', 'aria-label': 'Samples' },
      h('div', { class: 'results-bar' }, this.toggle, this.number, this.where, this.chips,
        h('div', { class: 'results-tools' }, h('button', { type: 'button', class: 'size', 'aria-label': 'Smaller', title: 'Smaller (−)', onclick: () => this.resize(-1) }, '−'),
          h('button', { type: 'button', class: 'size', 'aria-label': 'Larger', title: 'Larger (+)', onclick: () => this.resize(1) }, '+'), this.modes)),
      this.busy, this.note, this.problem, this.scroller.element));
    this.stopMarks = onMarks(() => this.draw());
    this.remember = debounced(() => replace(this.hash({})), 120);
    this.scroller.element.addEventListener('focusin', (event) => { const at = event.target.closest('[data-position]'); if (at) this.cursor = Number(at.dataset.position); });
    this.query();
  }

  /* --- state and URL --- */

  read(route) {
    this.filters = filtersOf(route.params);
    const pictured = store.dataset.fields.some((field) => field.image || field.video);
    this.view = route.params.get('view') ?? (pictured ? 'grid' : 'list');
    this.defaultView = pictured ? 'grid' : 'list';
    const size = Number(route.params.get('size') ?? 1);
    this.size = Math.min(WIDTHS.length - 1, Math.max(0, Number.isFinite(size) ? Math.round(size) : 1));
    const at = Number(route.params.get('at') ?? 0);
    this.target = Number.isFinite(at) && at > 0 ? Math.floor(at) : 0;
  }

  hash(part, at = this.firstPosition) {
    return link('grid', null, { ...this.filters, view: this.view === this.defaultView ? null : this.view, size: this.size === 1 ? null : this.size, at: at || null, ...part });
  }

  /** Follow a change of the URL: back, forward, or a filter. */
  update(route) {
    const before = JSON.stringify(this.filters);
    this.remember.cancel();
    this.read(route);
    this.panel.update(this.filters);
    if (JSON.stringify(this.filters) !== before) this.query();
    else this.layout(this.target);
    return true;
  }

  change(part) { go(this.hash({ ...part, at: null })); }

  setView(view) {
    const at = this.firstPosition;
    this.view = view;
    replace(this.hash({}, at));
    this.clear();
    this.layout(at);
  }

  resize(step) {
    const at = this.firstPosition;
    this.size = Math.min(WIDTHS.length - 1, Math.max(0, this.size + step));
    replace(this.hash({}, at));
    this.clear();
    this.layout(at);
  }

  query() {
    this.rows?.close();
    this.clear();
    fill(this.problem);
    this.cursor = this.target;
    this.rows = new Rows(this.filters, () => this.arrived(), (error) => this.failed(error));
    fill(this.chips, chips(this.filters, (part) => this.change(part)));
    fill(this.number, 'Counting …');
    this.rows.want(this.target, this.target + 1);
    this.draw();
  }

  failed(error) {
    if (this.rows.n !== null) return toast(error.message, true);
    fill(this.number);
    fill(this.problem, h('div', { class: 'page' }, errorBox(error, () => this.query())));
  }

  arrived() {
    const n = this.rows.n;
    const total = this.rows.nTotal;
    fill(this.number, Object.keys(this.filters).some((key) => key !== 'sort' && key !== 'desc') ? `${count(n)} of ${counted(total, 'sample')}` : counted(n, 'sample'));
    this.panel.showCount(n);
    fill(this.busy, !this.rows.complete && progressBar(this.rows.progress, 'Searching'));
    this.where.title = this.rows.text;
    fill(this.note, this.rows.text && h('p', { class: 'results-note' }, this.rows.text));
    if (n === 0 && this.rows.complete) {
      const filtered = Object.keys(this.filters).length > 0;
      fill(this.problem, h('div', { class: 'empty' }, h('h2', {}, filtered ? 'No sample matches' : 'The dataset is empty'),
        filtered && h('p', {}, 'Remove a filter, or widen it.'), filtered && h('button', { type: 'button', onclick: () => go(link('grid')) }, 'Remove all filters')));
    } else fill(this.problem);
    if (this.lastN !== n) { this.lastN = n; this.layout(this.target || this.firstPosition); }
    if (this.rows.complete || this.target < n) this.target = 0;
    this.draw();
  }

  /* --- layout --- */

  get isList() { return this.view === 'list'; }

  get columns() {
    if (this.isList) return 1;
    const width = this.scroller.width - 12;
    const wanted = WIDTHS[this.size];
    return Math.max(width < 400 && this.size < 2 ? 2 : 1, Math.floor(width / wanted));
  }

  get firstPosition() { return this.scroller.nLines ? Math.round(this.scroller.top / this.scroller.lineHeight) * (this.laidColumns ?? 1) : this.target; }

  /** Compute columns and heights, and keep the line with `position` at the top. */
  layout(position) {
    const n = this.rows?.n ?? 0;
    this.laidColumns = this.columns;
    this.tileWidth = Math.floor((this.scroller.width - 12) / this.laidColumns);
    const height = this.isList ? LINE_HEIGHT : Math.round(this.tileWidth * 0.75) + 26;
    const nLines = Math.ceil(n / this.laidColumns);
    this.scroller.resize(nLines, height, nLines ? Math.floor(Math.min(position, n - 1) / this.laidColumns) * height : 0);
    for (const [i, button] of [...this.modes.children].entries()) button.setAttribute('aria-pressed', String((i === 1) === this.isList));
    for (const button of this.modes.parentElement?.querySelectorAll('.size') ?? []) button.hidden = this.isList;
  }

  clear() {
    for (const [position, node] of this.nodes) this.drop(position, node);
  }

  /** Remove a sample from the page, and give up its thumbnail if that is still on its way. */
  drop(position, node) {
    const image = node.querySelector('img');
    if (image && !image.complete) image.removeAttribute('src');
    node.remove();
    this.nodes.delete(position);
  }

  draw() {
    if (!this.rows || this.rows.n === null) return;
    const { scroller } = this;
    const [first, last] = scroller.visible;
    const start = first * this.laidColumns;
    const stop = Math.min(this.rows.n, last * this.laidColumns);
    if (stop > start) this.rows.want(start, Math.min(this.rows.n, stop + this.laidColumns * 2));
    for (const [position, node] of this.nodes) {
      if (position >= start && position < stop) continue;
      if (node.link === document.activeElement) node.style.transform = 'translateX(-10000px)'; // removed, it would lose the focus
      else this.drop(position, node);
    }
    for (let position = start; position < stop; position++) this.place(position);
    const cursorNode = this.nodes.get(this.cursor);
    for (const node of this.nodes.values()) node.link.tabIndex = node === cursorNode ? 0 : -1;
    if (!cursorNode && this.nodes.get(start)) this.nodes.get(start).link.tabIndex = 0;
    const shown = stop > start ? `${count(start)}–${count(stop - 1)}` : '';
    if (this.where.textContent !== shown) this.where.textContent = shown;
    if (!this.target) this.remember?.();
  }

  place(position) {
    const row = this.rows.at(position);
    let node = this.nodes.get(position);
    if (!node || (row && node.row !== row)) {
      const made = this.make(position, row);
      const isFocused = node !== undefined && node.link === document.activeElement;
      if (node) node.replaceWith(made); else this.scroller.window.append(made);
      if (isFocused) made.link.focus({ preventScroll: true });
      this.nodes.set(position, made);
      node = made;
    }
    const line = Math.floor(position / this.laidColumns);
    const y = line * this.scroller.lineHeight - this.scroller.top;
    const x = 6 + (position % this.laidColumns) * this.tileWidth;
    node.style.transform = this.isList ? `translateY(${y}px)` : `translate(${x}px, ${y}px)`;
    node.flag?.setAttribute('aria-pressed', String(store.marks.has(row.row)));
  }

  make(position, row) {
    const props = { 'data-position': position, tabindex: -1 };
    if (row) props.href = link('sample', row.row, { ...this.filters, at: Object.keys(this.filters).length ? position : null });
    const made = this.isList ? this.makeLine(row, props) : this.makeTile(row, props);
    const node = h('div', { class: 'cell', role: 'listitem', 'aria-posinset': position + 1, 'aria-setsize': this.rows.n }, made);
    Object.assign(node, { row, link: made });
    if (row && !isStatic) {
      node.flag = h('button', { type: 'button', class: 'flag', tabindex: -1, 'aria-label': `Mark ${row.title || `sample ${row.row}`}`, title: 'Mark (m)', onclick: () => toggleMark(row.row) }, icon('flag'));
      node.append(node.flag);
    }
    made.addEventListener('click', () => { this.cursor = position; replace(this.hash({})); });
    return node;
  }

  makeTile(row, props) {
    const style = { width: `${this.tileWidth}px`, height: `${this.scroller.lineHeight}px` };
    if (!row) return h('a', { class: 'tile', style, 'aria-busy': 'true', ...props }, h('span', { class: 'picture' }), h('span', { class: 'caption' }));
    const text = h('span', { class: 'words' }, row.text || '');
    return h('a', { class: row.damaged ? 'tile damaged' : 'tile', style, 'aria-label': name(row), title: row.damaged || null, ...props },
      h('span', { class: 'picture' }, this.image(row, text) ?? text, row.damaged && [h('span', { class: 'cross' }), h('span', { class: 'finding' }, withoutPath(row.damaged))]),
      h('span', { class: 'caption' }, h('span', { class: 'title' }, row.title || count(row.row)), h('span', { class: 'label' }, row.label ?? '')));
  }

  makeLine(row, props) {
    const pictured = this.defaultView === 'grid';
    const style = { height: `${LINE_HEIGHT}px` };
    if (!row) return h('a', { class: 'line', style, 'aria-busy': 'true', ...props });
    this.isTitled ??= Boolean(row.title) && row.title !== String(row.row); // otherwise titles only repeat the row
    const isLabelled = store.dataset.classes.length > 0;
    const isTexted = !pictured || store.dataset.fields.filter((field) => field.searchable).length > (this.isTitled ? 1 : 0);
    const names = ['line', pictured && 'pictured', this.isTitled && 'titled', isLabelled && 'labelled', !isTexted && 'untexted', row.damaged && 'damaged'];
    return h('a', { class: names.filter(Boolean).join(' '), style, 'aria-label': name(row), title: row.damaged || null, ...props },
      pictured && (this.image(row, null, 64) ?? h('span', { class: 'thumb' })), h('span', { class: 'row' }, count(row.row)), this.isTitled && h('span', { class: 'title' }, row.title),
      isLabelled && h('span', { class: 'label' }, row.label ?? ''), h('span', { class: 'text' }, row.damaged ? withoutPath(row.damaged) : row.text || ''));
  }

  /** Return the thumbnail, which is asked for once its tile has stayed for a moment. */
  image(row, instead, size = Math.min(512, 64 * Math.ceil((this.tileWidth * Math.min(2, window.devicePixelRatio)) / 64))) {
    const url = row.damaged && !row.image ? null : api.thumbnail(row, size);
    if (!url) return null;
    const node = h('img', { alt: '', class: 'waiting', decoding: 'async', draggable: 'false' });
    node.addEventListener('load', () => node.classList.remove('waiting'));
    node.addEventListener('error', () => { if (instead) { instead.textContent ||= 'no picture'; node.replaceWith(instead); } });
    setTimeout(() => { if (node.isConnected) node.src = url; }, IMAGE_DELAY_MS);
    return node;
  }

  /* --- keys --- */

  move(to) {
    const n = this.rows.n ?? 0;
    if (!n) return;
    this.cursor = Math.max(0, Math.min(n - 1, to));
    this.scroller.reveal(Math.floor(this.cursor / this.laidColumns));
    this.draw();
    this.nodes.get(this.cursor)?.link.focus({ preventScroll: true });
  }

  /** Show a row: at its place among the filtered ones, or as a sample of its own. */
  async jump(row) {
    try {
      const { position } = isStatic || Object.keys(this.filters).length ? await api.position(row, this.filters) : { position: row };
      if (position === null && isStatic) { toast(`Row ${count(row)} is not among the exported samples.`, true); return; }
      if (position === null) { toast(`Row ${count(row)} is not among the filtered samples: showing it alone.`); go(link('sample', row)); return; }
      this.cursor = position;
      this.scroller.scrollToLine(Math.floor(position / this.laidColumns));
      this.draw();
      this.nodes.get(position)?.link.focus({ preventScroll: true });
    } catch (error) { toast(error.message, true); }
  }

  search() {
    this.openFilters(true);
    this.panel.focus();
  }

  openFilters(isOpen) {
    this.panel.element.classList.toggle('open', isOpen);
    this.toggle.setAttribute('aria-expanded', String(isOpen));
    if (!isOpen && this.panel.element.contains(document.activeElement)) this.toggle.focus();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.scroller.height / this.scroller.lineHeight)) * this.laidColumns;
    if (this.panel.element.contains(event.target) && event.key !== 'Escape') return false;
    const focused = this.nodes.get(this.cursor)?.link === document.activeElement;
    const steps = { ArrowRight: 1, j: 1, ArrowLeft: -1, k: -1, ArrowDown: this.laidColumns, ArrowUp: -this.laidColumns, PageDown: page, PageUp: -page };
    if (event.shiftKey && event.key.length > 1) return false;
    if (event.key in steps) {
      const [from, to] = this.scroller.visible;
      const isVisible = this.cursor >= from * this.laidColumns && this.cursor < to * this.laidColumns;
      const start = isVisible ? this.cursor : this.firstPosition;
      this.move(focused || event.key.startsWith('Page') ? start + steps[event.key] : start); // the first key only shows where the focus is
    } else if (event.key === 'Home') this.move(0);
    else if (event.key === 'End') this.move((this.rows.n ?? 1) - 1);
    else if (event.key === 'm') { const row = this.rows.at(this.cursor); if (row) toggleMark(row.row); }
    else if (event.key === '+' || event.key === '=') this.resize(1);
    else if (event.key === '-') this.resize(-1);
    else if (event.key === 'v') this.setView(this.isList ? 'grid' : 'list');
    else if (event.key === 'Escape' && this.panel.element.classList.contains('open')) this.openFilters(false);
    else return false;
    return true;
  }

  close() {
    this.rows?.close();
    this.remember.cancel();
    this.stopMarks();
    this.scroller.close();
  }
}

function name(row) {
  return [row.title || `sample ${row.row}`, row.label, row.damaged && `damaged: ${row.damaged}`, row.subset && `subset ${row.subset}`].filter(Boolean).join(', ');
}
