/**
 * Virtual scrolling over any number of lines.
 *
 * Browsers limit the height of an element to some 10⁷ pixels; 10⁹ rows are higher. Up to a height
 * that all browsers allow, the scroll bar is native. Above it, `top` (in pixels, exact in a double) is
 * kept here: wheel, keys and touch move it exactly, and the scroll bar shows and sets it in proportion.
 */

import { h } from './dom.js';

export const MAX_HEIGHT = 4_000_000;

export class Scroller {
  /** `draw()` is called in an animation frame after each change of the position or size. */
  constructor(draw, label) {
    this.draw = draw;
    this.top = 0;
    this.nLines = 0;
    this.lineHeight = 100;
    this.window = h('div', { class: 'window', role: 'presentation' });
    this.spacer = h('div', { class: 'spacer', 'aria-hidden': 'true' });
    this.element = h('div', { class: 'scroller', role: 'list', 'aria-label': label }, this.window, this.spacer);
    this.expected = 0;
    this.pending = 0;
    this.velocity = 0;
    this.element.addEventListener('scroll', () => this.scrolled(), { passive: true });
    this.element.addEventListener('wheel', (event) => this.wheeled(event), { passive: false });
    this.element.addEventListener('pointerdown', (event) => this.touched(event));
    this.observer = new ResizeObserver(() => this.changed());
    this.observer.observe(this.element);
  }

  get width() { return this.element.clientWidth; }
  get height() { return this.element.clientHeight; }
  get total() { return this.nLines * this.lineHeight; }
  get maxTop() { return Math.max(0, this.total - this.height); }
  get isScaled() { return this.total > MAX_HEIGHT; }

  /** Set the number and height of the lines, and keep `top` within them. */
  resize(nLines, lineHeight, top = this.top) {
    this.nLines = nLines;
    this.lineHeight = lineHeight;
    const shown = Math.min(this.total, MAX_HEIGHT);
    this.spacer.style.height = `${Math.max(0, shown - this.height)}px`;
    this.element.classList.toggle('scaled', this.isScaled);
    this.scrollTo(top);
  }

  changed() {
    this.onresize?.();
    this.request();
  }

  /** Move to a position in pixels of the whole list. */
  scrollTo(top) {
    this.top = Math.max(0, Math.min(this.maxTop, top));
    this.place();
    this.request();
  }

  scrollToLine(line) { this.scrollTo(line * this.lineHeight); }

  /** Scroll by as little as shows a line entirely. */
  reveal(line) {
    const top = line * this.lineHeight;
    if (top < this.top) this.scrollTo(top);
    else if (top + this.lineHeight > this.top + this.height) this.scrollTo(top + this.lineHeight - this.height);
  }

  /** Put the scroll bar where `top` is. */
  place() {
    const range = this.element.scrollHeight - this.element.clientHeight;
    const at = this.isScaled && this.maxTop ? (this.top / this.maxTop) * range : this.top;
    this.element.scrollTop = at;
    this.expected = this.element.scrollTop;
  }

  scrolled() {
    const at = this.element.scrollTop;
    if (Math.abs(at - this.expected) < 1) return;
    this.expected = at;
    const range = this.element.scrollHeight - this.element.clientHeight;
    this.top = this.isScaled && range ? (at / range) * this.maxTop : at;
    this.request();
  }

  wheeled(event) {
    if (!this.isScaled || event.ctrlKey) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 32 : event.deltaMode === 2 ? this.height : 1;
    this.scrollTo(this.top + event.deltaY * unit);
  }

  /** Follow a finger where the browser's own scrolling would be scaled. */
  touched(event) {
    if (!this.isScaled || event.pointerType !== 'touch') return;
    let last = event.clientY;
    let at = performance.now();
    this.velocity = 0;
    const move = (each) => {
      const now = performance.now();
      this.velocity = (last - each.clientY) / Math.max(1, now - at);
      this.scrollTo(this.top + last - each.clientY);
      last = each.clientY;
      at = now;
    };
    const end = () => {
      this.element.removeEventListener('pointermove', move);
      this.element.removeEventListener('pointerup', end);
      this.element.removeEventListener('pointercancel', end);
      this.glide();
    };
    this.element.addEventListener('pointermove', move);
    this.element.addEventListener('pointerup', end);
    this.element.addEventListener('pointercancel', end);
  }

  glide() {
    if (Math.abs(this.velocity) < 0.05) return;
    this.scrollTo(this.top + this.velocity * 16);
    this.velocity *= 0.95;
    requestAnimationFrame(() => this.glide());
  }

  request() {
    this.pending ||= requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  /** The lines that are at least partly visible: [first, last). */
  get visible() {
    const first = Math.max(0, Math.floor(this.top / this.lineHeight));
    return [first, Math.min(this.nLines, Math.ceil((this.top + this.height) / this.lineHeight))];
  }

  close() {
    this.observer.disconnect();
    cancelAnimationFrame(this.pending);
  }
}
