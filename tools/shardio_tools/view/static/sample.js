/** One sample: all its fields, on one clock, with the next and the previous one of the query. */

import { h, fill, icon, iconButton, count, errorBox, toast, debounced } from './dom.js';
import { api, isStatic } from './api.js';
import { link, go, replace, filtersOf } from './route.js';
import { store, setMark, toggleMark, onMarks, withoutPath } from './store.js';
import { chips } from './filters.js';
import { makePlayer } from './player.js';
import { fieldSection, isWide } from './fields.js';

const RETRY_MS = 400;

export function show(root, route, signal) {
  return new SamplePage(root, route, signal);
}

class SamplePage {
  constructor(root, route, signal) {
    this.root = root;
    this.signal = signal;
    this.stopMarks = onMarks(() => this.showMark());
    this.open(route);
  }

  open(route) {
    this.inner?.abort();
    this.player?.close();
    this.player = null;
    this.inner = new AbortController();
    this.signal.addEventListener('abort', () => this.inner.abort(), { signal: this.inner.signal });
    this.row = /^\d+$/.test(route.args[0] ?? '') ? Number(route.args[0]) : null;
    this.filters = filtersOf(route.params);
    this.time = Math.max(0, Number(route.params.get('t')) || 0);
    const at = route.params.get('at');
    this.isQuery = isStatic || Object.keys(this.filters).length > 0; // otherwise positions are rows
    this.position = at !== null && /^\d+$/.test(at) ? Number(at) : this.isQuery ? null : this.row;
    this.nOfQuery = this.isQuery ? null : store.dataset.n_samples;
    this.load();
  }

  /** Follow a change of the URL: another sample, or another time of this one. */
  update(route) {
    const isSame = String(this.row) === route.args[0] && JSON.stringify(this.filters) === JSON.stringify(filtersOf(route.params));
    if (isSame && this.player) this.player.clock.seek(Math.max(0, Number(route.params.get('t')) || 0));
    else if (!isSame) this.open(route);
    return true;
  }

  hash(row = this.row, position = this.position, time = null) {
    return link('sample', row, { t: time, ...this.filters, at: this.isQuery ? position : null });
  }

  async load() {
    const signal = this.inner.signal;
    const busy = setTimeout(() => this.root.setAttribute('aria-busy', 'true'), 150);
    try {
      if (this.row === null) throw new Error('A sample is named by its row: a whole number from 0.');
      const sample = await api.sample(this.row, signal);
      if (signal.aborted) return;
      this.showSample(sample);
    } catch (error) {
      if (error.name === 'AbortError') return;
      fill(this.root, this.head({ title: `Sample ${this.row ?? ''}` }), errorBox(error, () => this.load()));
      this.findPlace();
    } finally {
      clearTimeout(busy);
      this.root.removeAttribute('aria-busy');
    }
  }

  /* --- what is shown --- */

  showSample(sample) {
    const signal = this.inner.signal;
    const fields = (sample.fields ?? []).map((field) => (field.damaged && field.damaged === sample.damaged ? { ...field, damaged: 'Cannot be read, see above.' } : field));
    this.player = makePlayer(fields, sample.clip ?? null, signal);
    const clock = this.player?.clock ?? null;
    const section = (field) => fieldSection(field, clock, signal);
    const played = (field) => field.kind === 'video' && !field.damaged && !field.missing;
    const wide = fields.filter((field) => isWide(field) && !field.damaged && !field.missing);
    const side = fields.filter((field) => !wide.includes(field) && !played(field));
    const left = [this.player?.element, wide.map(section)].flat().filter(Boolean);
    fill(this.root, this.head(sample), sample.damaged && h('div', { class: 'notice bad', role: 'alert' }, h('p', {}, `Cannot be read in full: ${withoutPath(sample.damaged)}`)),
      h('div', { class: left.length && side.length ? 'sample-body' : 'sample-body narrow' }, left.length > 0 && h('div', {}, left), side.length > 0 && h('div', { class: 'side' }, side.map(section)),
        !fields.length && h('p', { class: 'muted' }, 'None of the fields can be read.')));
    if (clock) {
      if (this.time) clock.seek(this.time);
      const remember = debounced(() => { if (!signal.aborted) replace(this.hash(this.row, this.position, clock.time ? Number(clock.time.toFixed(3)) : null)); }, 100);
      clock.on('rest', remember, signal);
      signal.addEventListener('abort', remember.cancel);
    }
    this.showMark();
    this.findPlace();
  }

  head(sample) {
    this.where = h('span', { class: 'where' });
    this.previousButton = iconButton('previous', 'Previous sample', () => this.step(-1), '←');
    this.nextButton = iconButton('next', 'Next sample', () => this.step(1), '→');
    this.markText = h('span', {}, 'Mark');
    this.markButton = h('button', { type: 'button', class: 'mark-button', 'aria-pressed': 'false', 'aria-keyshortcuts': 'm', title: 'Mark (m)', onclick: () => toggleMark(this.row) }, icon('flag'), this.markText);
    this.note = h('input', { type: 'text', class: 'note', placeholder: 'Note (n)', 'aria-label': 'Note of the mark', maxlength: 500, autocomplete: 'off' });
    this.note.addEventListener('change', () => setMark(this.row, true, this.note.value.trim()));
    this.note.addEventListener('keydown', (event) => { if (event.key === 'Enter') this.note.blur(); });
    const title = sample.title || `Sample ${count(this.row)}`;
    const isNumber = title === String(this.row);
    const about = [!isNumber && this.row !== null && `row ${count(this.row)}`, sample.shard !== undefined && sample.shard !== null && `${sample.shard}${sample.index !== undefined ? `, record ${count(sample.index)}` : ''}`].filter(Boolean).join(' · ');
    return h('div', { class: 'sample-head' }, h('div', { class: 'steps', role: 'group', 'aria-label': 'Previous and next' }, this.previousButton, this.where, this.nextButton),
      h('div', {}, h('h1', {}, isNumber ? `Sample ${count(this.row)}` : title), about && h('p', { class: 'muted' }, about)),
      Object.keys(this.filters).length > 0 && h('div', { class: 'chips' }, chips(this.filters, (part) => go(link('grid', null, { ...this.filters, ...part })))),
      !isStatic && h('div', { class: 'actions' }, this.note, this.markButton));
  }

  showMark() {
    if (!this.markButton) return;
    const isMarked = store.marks.has(this.row);
    this.markButton.setAttribute('aria-pressed', String(isMarked));
    this.markText.textContent = isMarked ? 'Marked' : 'Mark';
    if (document.activeElement !== this.note) this.note.value = store.marks.get(this.row) ?? '';
  }

  /** Find where the sample is among the rows of the query. */
  async findPlace() {
    const signal = this.inner.signal;
    try {
      while (this.position === null) {
        const found = await api.position(this.row, this.filters, signal);
        if (signal.aborted) return;
        this.position = found.position;
        if (found.complete !== false) break;
        await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); }); // the search has not come to it yet
      }
      if (this.nOfQuery === null) this.nOfQuery = (await api.rows(0, 1, this.filters, signal)).n;
    } catch (error) { if (error.name === 'AbortError') return; }
    if (signal.aborted) return;
    const n = this.nOfQuery;
    this.where.textContent = this.position === null ? 'not in the query' : `${count(this.position + 1)} of ${count(n)}`;
    this.previousButton.disabled = this.position === null || this.position <= 0;
    this.nextButton.disabled = this.position === null || this.position >= n - 1;
  }

  async step(by) {
    const to = (this.position ?? -1) + by;
    if (this.position === null) { toast('The sample is not among the filtered ones: remove a filter to step.'); return; }
    if (to < 0 || (this.nOfQuery !== null && to >= this.nOfQuery)) { toast(by < 0 ? 'This is the first sample.' : 'This is the last sample.'); return; }
    if (!this.isQuery) { this.position = to; go(this.hash(to, to)); return; }
    try {
      const found = await api.rows(to, 1, this.filters, this.inner.signal);
      if (this.inner.signal.aborted) return;
      if (found.rows.length) go(this.hash(found.rows[0].row, to));
    } catch (error) { if (error.name !== 'AbortError') toast(error.message, true); }
  }

  key(event) {
    if (this.player?.key(event)) return true;
    if (event.shiftKey && event.key.startsWith('Arrow')) return false;
    if (event.key === 'ArrowRight' || event.key === 'j') this.step(1);
    else if (event.key === 'ArrowLeft' || event.key === 'k') this.step(-1);
    else if (event.key === 'm' && this.row !== null) toggleMark(this.row);
    else if (event.key === 'n' && !isStatic) this.note?.focus();
    else if (event.key === 'Escape') go(link('grid', null, { ...this.filters, at: this.position || null }));
    else return false;
    return true;
  }

  close() {
    this.inner.abort();
    this.player?.close();
    this.stopMarks();
  }
}
