/** Canvases that are drawn anew when their size or the colour scheme changes. */

const scheme = window.matchMedia('(prefers-color-scheme: dark)');

/** Return the value of a custom property, such as a colour. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/**
 * Draw a canvas with `draw(context, width, height)` in CSS pixels, now and when it changes. Returns
 * a function that asks for another drawing; `signal` ends it.
 */
export function drawn(canvas, draw, signal) {
  let pending = 0;
  const now = () => {
    pending = 0;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !height) return;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const context = canvas.getContext('2d');
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, width, height);
  };
  const request = () => { pending ||= requestAnimationFrame(now); };
  const observer = new ResizeObserver(request);
  observer.observe(canvas);
  scheme.addEventListener('change', request, { signal });
  signal.addEventListener('abort', () => { observer.disconnect(); cancelAnimationFrame(pending); });
  request();
  return request;
}

/** Return round numbers between two values, at most about `n`. */
export function ticks(low, high, n) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const raw = span / Math.max(1, n);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((each) => each * power >= raw) ?? 10);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

/** Return round times in seconds for an axis of `width` pixels. */
export function timeTicks(seconds, width) {
  const wanted = seconds / Math.max(1, width / 80);
  const step = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600].find((each) => each >= wanted) ?? Math.ceil(wanted / 3600) * 3600;
  const found = [];
  for (let i = 0; i * step <= seconds; i++) found.push(i * step);
  return found;
}

/**
 * Make an element a slider: pointer and keys call `set(fraction, isMoving)`, or `step(n)` for arrows.
 * `pan-y` stays with the browser, so that a finger can still scroll the page.
 */
export function scrub(element, set, step) {
  const at = (event) => {
    const box = element.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / Math.max(1, box.width)));
  };
  element.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    element.setPointerCapture(event.pointerId);
    set(at(event), true);
    const move = (each) => set(at(each), true);
    const end = (each) => {
      element.removeEventListener('pointermove', move);
      element.removeEventListener('pointerup', end);
      element.removeEventListener('pointercancel', end);
      if (each.type === 'pointerup') set(at(each), false);
    };
    element.addEventListener('pointermove', move);
    element.addEventListener('pointerup', end);
    element.addEventListener('pointercancel', end);
  });
  element.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (event.key === 'ArrowRight' || event.key === 'ArrowUp') step(1);
    else if (event.key === 'ArrowLeft' || event.key === 'ArrowDown') step(-1);
    else if (event.key === 'PageUp') step(10);
    else if (event.key === 'PageDown') step(-10);
    else if (event.key === 'Home') set(0, false);
    else if (event.key === 'End') set(1, false);
    else return;
    event.preventDefault();
  });
}
