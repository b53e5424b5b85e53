/** Line charts, waveforms and heat maps, drawn on canvases from what the server has reduced. */

import { h, fill, number, clockText, count, errorBox } from './dom.js';
import { api } from './api.js';
import { drawn, colour, scrub, ticks } from './canvas.js';

const SERIES_COLOURS = ['s1', 's2', 's3', 's4', 's5', 's6', 's7', 's8'];
const MAX_POINTS = 2000;
const MAX_SHOWN = 12;

/**
 * Return a chart of an array's columns. With `times` and a clock, its cursor is the time; without,
 * the cursor is an index of its own.
 */
export function lineChart(field, clock, signal) {
  const node = h('div', { 'aria-busy': 'true' }, h('div', { class: 'chart' }));
  api.series(field.series, MAX_POINTS, signal).then((found) => {
    node.removeAttribute('aria-busy');
    fill(node, new LineChart(field, found, clock, signal).nodes);
  }).catch((error) => { if (error.name !== 'AbortError') fill(node, errorBox(error)); });
  return node;
}

class LineChart {
  constructor(field, found, clock, signal) {
    this.n = found.n;
    this.columns = found.columns;
    this.clock = clock && found.times && clock.duration ? clock : null;
    this.times = this.clock ? onClock(found, clock) : null;
    this.index = 0;
    this.shown = new Set(this.columns.map((_, i) => i).filter((i) => i < MAX_SHOWN));
    const canvas = h('canvas', {});
    this.plot = h('div', { class: 'chart', role: 'slider', tabindex: 0, 'aria-label': `Chart of ${field.name}: ${this.columns.length} columns of ${count(this.n)} values`, 'aria-valuemin': 0, 'aria-valuemax': Math.max(0, this.n - 1) }, canvas);
    this.redraw = drawn(canvas, (context, width, height) => this.draw(context, width, height), signal);
    scrub(this.plot, (fraction, isMoving) => this.setFraction(fraction, isMoving), (n) => this.step(n));
    this.legend = h('div', { class: 'legend', role: 'group', 'aria-label': `Columns of ${field.name}` });
    this.labels = [];
    if (this.columns.length <= 64) {
      fill(this.legend, this.columns.map((column, i) => {
        const at = h('span', { class: 'at' });
        this.labels.push(at);
        return h('button', { type: 'button', 'aria-pressed': String(this.shown.has(i)), onclick: (event) => this.toggle(i, event.currentTarget) },
          h('span', { class: 'swatch', style: { background: `var(--${SERIES_COLOURS[i % SERIES_COLOURS.length]})` } }), column.name, at);
      }));
    }
    if (this.clock) this.clock.on('time', () => this.follow(), signal);
    this.nodes = [this.plot, this.legend, found.note && h('p', { class: 'muted' }, found.note)];
    this.follow();
  }

  /** The seconds from the left edge to the right one. */
  get span() { return this.clock ? this.clock.duration : this.n; }

  toggle(i, button) {
    if (this.shown.has(i)) this.shown.delete(i); else this.shown.add(i);
    button.setAttribute('aria-pressed', String(this.shown.has(i)));
    this.redraw();
  }

  setFraction(fraction, isMoving) {
    if (this.clock) { this.clock.pause(); this.clock.seek(fraction * this.clock.duration, isMoving); return; }
    this.index = Math.max(0, Math.min(this.n - 1, Math.floor(fraction * this.n)));
    this.follow();
  }

  step(n) {
    if (this.clock) { this.clock.pause(); this.clock.seek(this.clock.time + n * this.times[1]); return; }
    this.index = Math.max(0, Math.min(this.n - 1, this.index + n));
    this.follow();
  }

  follow() {
    if (this.clock) this.index = Math.max(0, Math.min(this.n - 1, Math.floor((this.clock.time - this.times[0]) / this.times[1] + 1e-6)));
    const points = this.columns[0]?.min.length ?? 0;
    const at = Math.min(points - 1, Math.floor((this.index / Math.max(1, this.n)) * points));
    for (const [i, label] of this.labels.entries()) {
      const { min, max } = this.columns[i];
      label.textContent = min[at] === max[at] ? number(min[at], 4) : `${number(min[at], 3)}…${number(max[at], 3)}`;
    }
    this.plot.setAttribute('aria-valuenow', this.index);
    const where = this.clock ? clockText(this.clock.time) : `index ${count(this.index)}`;
    this.plot.setAttribute('aria-valuetext', `${where}: ${this.columns.slice(0, 6).map((column) => `${column.name} ${number(column.min[at], 3)}`).join(', ')}`);
    this.redraw();
  }

  draw(context, width, height) {
    const top = 4;
    const bottom = height - 4;
    let low = Infinity;
    let high = -Infinity;
    for (const i of this.shown) {
      for (const value of this.columns[i].min) if (value !== null && value < low) low = value;
      for (const value of this.columns[i].max) if (value !== null && value > high) high = value;
    }
    if (!(low <= high)) { low = 0; high = 1; }
    if (low === high) { low -= 0.5; high += 0.5; }
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
    this.axes(context, width, height, low, high, y);
    const points = this.columns[0]?.min.length ?? 0;
    const start = this.clock ? (this.times[0] / this.span) * width : 0;
    const step = this.clock ? ((this.n * this.times[1]) / points / this.span) * width : width / Math.max(1, points);
    for (const i of this.shown) this.line(context, this.columns[i], colour(SERIES_COLOURS[i % SERIES_COLOURS.length]), start, step, y);
    const cursor = this.clock ? (this.clock.time / this.span) * width : ((this.index + 0.5) / Math.max(1, this.n)) * width;
    context.fillStyle = colour('ink');
    context.fillRect(Math.min(width - 1, Math.round(cursor)), 0, 1, height);
  }

  axes(context, width, height, low, high, y) {
    context.strokeStyle = colour('line');
    context.fillStyle = colour('ink-3');
    context.font = `10.5px ${colour('sans')}`;
    context.textBaseline = 'bottom';
    context.lineWidth = 1;
    for (const value of ticks(low, high, 4)) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(0, at);
      context.lineTo(width, at);
      context.stroke();
      const below = at > 14 ? at - 1 : at + 12;
      context.strokeStyle = colour('bg');
      context.lineWidth = 3;
      context.strokeText(number(value, 3), 3, below);
      context.fillText(number(value, 3), 3, below);
      context.strokeStyle = colour('line');
      context.lineWidth = 1;
    }
  }

  /** Draw the least and the greatest value of each point as one line; null leaves a gap. */
  line(context, column, stroke, start, step, y) {
    context.strokeStyle = stroke;
    context.lineWidth = 1.4;
    context.lineJoin = 'round';
    context.beginPath();
    let isDown = false;
    for (let i = 0; i < column.min.length; i++) {
      const low = column.min[i];
      const high = column.max[i];
      if (low === null || high === null) { isDown = false; continue; }
      const x = start + (i + 0.5) * step;
      if (isDown) context.lineTo(x, y(high)); else context.moveTo(x, y(high));
      if (high !== low) context.lineTo(x, y(low));
      else if (!isDown) context.lineTo(x + 0.01, y(low));
      isDown = true;
    }
    context.stroke();
  }
}

/** Return the times of values on the clock: those of another zero begin with it. */
function onClock({ n, times: [start, step] }, clock) {
  const overlaps = (first) => first < clock.duration && first + n * step > 0;
  return [[start - clock.base, start].find(overlaps) ?? 0, step];
}

/** Return the waveform of a sound, with the clock's time as its cursor. */
export function waveform(field, clock, signal) {
  const canvas = h('canvas', { role: 'img', 'aria-label': `Waveform of ${field.name}` });
  const node = h('div', { class: 'wave' }, canvas);
  let columns = [];
  const redraw = drawn(canvas, (context, width, height) => {
    const each = height / Math.max(1, columns.length);
    for (const [i, column] of columns.entries()) {
      const middle = (i + 0.5) * each;
      const most = Math.max(1e-9, ...column.max.map((value) => Math.abs(value ?? 0)), ...column.min.map((value) => Math.abs(value ?? 0)));
      const scale = (each / 2 - 1) / most;
      const span = (field.seconds / (clock?.duration || field.seconds)) * width;
      const played = clock ? (clock.time / clock.duration) * width : 0;
      for (let x = 0; x < span; x++) {
        const from = Math.floor((x / span) * column.min.length);
        const to = Math.max(from + 1, Math.floor(((x + 1) / span) * column.min.length));
        let low = 0;
        let high = 0;
        for (let k = from; k < to; k++) { low = Math.min(low, column.min[k] ?? 0); high = Math.max(high, column.max[k] ?? 0); }
        context.fillStyle = x < played ? waveColours[0] : waveColours[1];
        context.fillRect(x, middle - high * scale, 1, Math.max(1, (high - low) * scale));
      }
    }
    if (clock) { context.fillStyle = colour('ink'); context.fillRect(Math.min(width - 1, (clock.time / clock.duration) * width), 0, 1, height); }
  }, signal);
  let waveColours = [colour('accent'), colour('accent-fill')];
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { waveColours = [colour('accent'), colour('accent-fill')]; redraw(); }, { signal });
  clock?.on('time', redraw, signal);
  if (clock) {
    node.addEventListener('pointerdown', (event) => {
      const box = node.getBoundingClientRect();
      clock.seek(((event.clientX - box.left) / box.width) * clock.duration);
    });
  }
  api.series(field.waveform, MAX_POINTS, signal).then((found) => { columns = found.columns; redraw(); })
    .catch((error) => { if (error.name !== 'AbortError') fill(node, errorBox(error)); });
  return node;
}

/** Return a heat map with its scale. */
export function heatMap(field, signal) {
  const canvas = h('canvas', { role: 'img', 'aria-label': `Heat map of ${field.name}` });
  const scale = h('p', { class: 'scale' });
  const node = h('div', { class: 'heat', 'aria-busy': 'true' }, canvas, scale);
  api.heatmap(field.heatmap, signal).then(({ bitmap, range }) => {
    const [low, high] = range ?? [field.min, field.max];
    canvas.width = bitmap.width;
    canvas.height = bitmap.height;
    canvas.getContext('2d').drawImage(bitmap, 0, 0);
    const wide = Math.max(1, Math.round(Math.min(640 / bitmap.width, 320 / bitmap.height)));
    canvas.style.width = `${bitmap.width * wide}px`;
    fill(scale, `${number(low)} (dark) to ${number(high)} (bright)`);
    node.removeAttribute('aria-busy');
  }).catch((error) => { if (error.name !== 'AbortError') fill(node, errorBox(error)); });
  return node;
}
