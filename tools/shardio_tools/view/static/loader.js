/** What the loader sees: the batches of an epoch in its order, after transforms; two epochs side by side. */

import { h, fill, iconButton, count, errorBox } from './dom.js';
import { api, isStatic } from './api.js';
import { link, go } from './route.js';
import { store } from './store.js';

const NAMES = ['batch_size', 'shuffle', 'seed', 'weights'];

export function show(root, route, signal) {
  if (isStatic) { fill(root, h('p', {}, 'An exported page has no loader.')); return {}; }
  return new LoaderPage(root, route, signal);
}

class LoaderPage {
  constructor(root, route, signal) {
    this.signal = signal;
    this.answers = new Map();
    this.form = h('form', { class: 'options', 'aria-label': 'Options of the loader', onsubmit: (event) => event.preventDefault() });
    this.about = h('p', { class: 'lead' });
    this.panels = h('div', { class: 'epochs' });
    fill(root, h('div', { class: 'heading' }, h('h1', {}, 'What the loader sees')), this.about, this.form, this.panels);
    this.read(route);
    this.draw();
  }

  read(route) {
    const whole = (name, otherwise) => { const value = route.params.get(name); return value !== null && /^\d+$/.test(value) ? Number(value) : otherwise; };
    this.state = { epoch: whole('epoch', 0), batch: whole('batch', 0), epoch2: whole('epoch2', null) };
    this.options = {};
    for (const name of NAMES) if (route.params.get(name) !== null) this.options[name] = route.params.get(name);
  }

  hash(part = {}) { return link('loader', null, { ...this.state, ...this.options, ...part, ...zeroes({ ...this.state, ...part }) }); }

  update(route) {
    this.read(route);
    this.draw();
    return true;
  }

  change(part) { go(this.hash(part)); }

  /* --- panels --- */

  draw() {
    const epochs = this.state.epoch2 === null ? [this.state.epoch] : [this.state.epoch, this.state.epoch2];
    this.panels.classList.toggle('two', epochs.length === 2);
    while (this.panels.children.length > epochs.length) this.panels.lastChild.remove();
    while (this.panels.children.length < epochs.length) this.panels.append(h('section', {}));
    epochs.forEach((epoch, i) => this.fetch(this.panels.children[i], epoch, i));
  }

  async fetch(node, epoch, i) {
    node.inner?.abort();
    node.inner = new AbortController();
    this.signal.addEventListener('abort', () => node.inner.abort(), { signal: node.inner.signal });
    const { signal } = node.inner;
    node.setAttribute('aria-busy', 'true');
    node.setAttribute('aria-label', `Epoch ${epoch}`);
    if (!node.children.length) fill(node, h('p', { class: 'muted' }, 'Computing the order …'));
    try {
      const found = await api.epoch({ epoch, batch: this.state.batch, ...this.options }, signal);
      if (signal.aborted) return;
      if (i === 0) this.showOptions(found);
      fill(node, this.panelHead(found, i), this.samples(found));
    } catch (error) {
      if (error.name === 'AbortError') return;
      if (i === 0) this.showOptions(this.last ?? {});
      fill(node, h('div', { class: 'epoch-head' }, h('h2', {}, `Epoch ${count(epoch)}`)), errorBox(error, () => this.fetch(node, epoch, i)));
    }
    node.removeAttribute('aria-busy');
  }

  panelHead(found, i) {
    const key = i ? 'epoch2' : 'epoch';
    const epoch = found.epoch;
    const step = (by) => this.change({ batch: Math.max(0, Math.min(found.n_batches - 1, this.state.batch + by)) });
    if (i === 0) this.nBatches = found.n_batches;
    return h('div', { class: 'epoch-head' }, h('h2', {}, `Epoch ${count(epoch)}`),
      iconButton('previous', `Epoch before${i ? ', second' : ''}`, () => this.change({ [key]: Math.max(0, epoch - 1) }), i ? '' : '[', { disabled: epoch === 0 }),
      iconButton('next', `Epoch after${i ? ', second' : ''}`, () => this.change({ [key]: epoch + 1 }), i ? '' : ']'),
      i === 0 ? h('button', { type: 'button', 'aria-pressed': String(this.state.epoch2 !== null), 'aria-keyshortcuts': '2', title: 'Two epochs side by side (2)', onclick: () => this.toggleTwo() }, 'Compare')
        : null,
      h('div', { class: 'batch' }, i === 0 && iconButton('previous', 'Batch before', () => step(-1), '←', { disabled: found.batch <= 0 }),
        h('span', { class: 'batch-text' }, `batch ${count(found.batch)} of ${count(found.n_batches)}`),
        i === 0 && iconButton('next', 'Batch after', () => step(1), '→', { disabled: found.batch >= found.n_batches - 1 })));
  }

  samples(found) {
    if (!found.samples.length) return h('p', { class: 'muted' }, 'The batch has no samples.');
    return h('ul', { class: found.samples.length <= 12 && this.state.epoch2 === null ? 'samples few' : 'samples' }, found.samples.map((each, i) => {
      const skipped = each.skipped;
      const picture = each.thumb && !skipped ? h('img', { src: each.thumb, alt: '', loading: 'lazy', decoding: 'async' }) : null;
      picture?.addEventListener('error', () => picture.replaceWith(h('span', { class: 'values' }, 'no picture')));
      const isValid = each.valid !== false;
      const origin = typeof each.origin === 'string' ? each.origin : each.origin ? JSON.stringify(each.origin) : '';
      return h('li', { class: isValid ? '' : 'invalid' }, h('a', { href: each.row === null ? null : link('sample', each.row), 'aria-label': `Item ${i}: sample ${each.row}${each.label ? `, ${each.label}` : ''}${isValid ? '' : ', not valid'}${skipped ? `, skipped: ${skipped}` : ''}` },
        h('span', { class: 'picture' }, picture, !picture && !skipped && h('span', { class: 'values' }, (each.fields ?? []).map((field) => `${field.name} ${field.text}`).join('\n')),
          skipped && [h('span', { class: 'cross' }), h('span', { class: 'finding' }, skipped)]),
        h('span', { class: 'caption' }, h('span', {}, each.label ?? ''), h('span', { class: 'muted' }, isValid ? `row ${count(each.row)}` : 'not valid'))),
      origin && h('p', { class: 'origin', title: origin }, origin));
    }));
  }

  /* --- options --- */

  showOptions(found) {
    this.last = found;
    fill(this.about, [found.text, found.transform && `transform: ${found.transform}`, found.fixed && 'options are those of the loader’s file'].filter(Boolean).join(' · '));
    if (this.form.contains(document.activeElement)) return;
    const value = (name, otherwise) => this.options[name] ?? found[name] ?? otherwise;
    const apply = (name) => (event) => { this.options = { ...this.options, [name]: event.target.value }; this.change({ batch: 0 }); };
    const shuffles = found.shuffles ?? ['none', 'full'];
    const shuffle = String(value('shuffle', shuffles[0]));
    const weights = store.dataset.fields.filter((field) => field.sortable).map((field) => field.name);
    const control = (name, label, node) => h('label', {}, h('span', {}, label), node);
    const numeric = (name, least) => h('input', { type: 'number', name, min: least, step: 1, value: value(name, ''), onchange: apply(name) });
    fill(this.form,
      control('epoch', 'Epoch', h('input', { type: 'number', name: 'epoch', min: 0, step: 1, value: this.state.epoch, onchange: (event) => this.change({ epoch: Math.max(0, Number(event.target.value) || 0) }) })),
      control('batch', 'Batch', h('input', { type: 'number', name: 'batch', min: 0, step: 1, value: this.state.batch, onchange: (event) => this.change({ batch: Math.max(0, Number(event.target.value) || 0) }) })),
      !found.fixed && [control('batch_size', 'Batch size', numeric('batch_size', 1)),
        control('shuffle', 'Shuffle', h('select', { name: 'shuffle', onchange: apply('shuffle') }, [...new Set([...shuffles, shuffle])].map((each) => h('option', { value: each, selected: each === shuffle }, each)))),
        control('seed', 'Seed', numeric('seed', 0)),
        weights.length > 0 && control('weights', 'Weights', h('select', { name: 'weights', onchange: apply('weights') }, ['', ...weights].map((each) => h('option', { value: each, selected: each === String(value('weights', '') ?? '') }, each || 'equal'))))]);
  }

  toggleTwo() { this.change({ epoch2: this.state.epoch2 === null ? this.state.epoch + 1 : null }); }

  key(event) {
    const last = (this.nBatches ?? Infinity) - 1;
    if (event.shiftKey) return false;
    if (event.key === 'ArrowRight' || event.key === 'j') this.change({ batch: Math.min(last, this.state.batch + 1) });
    else if (event.key === 'ArrowLeft' || event.key === 'k') this.change({ batch: Math.max(0, this.state.batch - 1) });
    else if (event.key === ']') this.change({ epoch: this.state.epoch + 1 });
    else if (event.key === '[') this.change({ epoch: Math.max(0, this.state.epoch - 1) });
    else if (event.key === '2') this.toggleTwo();
    else return false;
    return true;
  }

  close() { for (const node of this.panels.children) node.inner?.abort(); }
}

/** Leave out zeroes, which are where the page begins; a second epoch 0 stays. */
function zeroes(state) {
  return { epoch: state.epoch || null, batch: state.batch || null };
}
