/** One clock for all that has time in a sample: videos, sound, charts. */

const DRIFT_S = 0.1;

/**
 * A clock that plays media together. A medium has `seek(seconds)`, `play()`, `pause()`,
 * `rate(value)`, `time` (seconds, or null if it has no clock of its own), `isReady` and `ended`.
 * The first medium with a time of its own leads; the others follow it.
 */
export class Clock extends EventTarget {
  constructor() {
    super();
    this.media = [];
    this.time = 0;
    this.duration = 0;
    this.fps = 0;
    this.speed = 1;
    this.isPlaying = false;
    this.handle = 0;
    this.nFrames = 0;
    this.times = null;
    this.offset = 0;
    this.base = 0;
    this.loop = null;
  }

  /** Add a medium; the clock runs as long as the longest. */
  add(medium, duration) {
    this.media.push(medium);
    this.duration = Math.max(this.duration, duration || 0);
  }

  /** Step by the frames of this video, which begins `offset` seconds after the clock. */
  setFrames(fps, nFrames, times, offset) {
    Object.assign(this, { fps, nFrames, times, offset });
  }

  get frame() { return this.frameAt(this.time); }

  /** Return the frame that is shown at a time. */
  frameAt(seconds) {
    seconds -= this.offset;
    if (this.times) {
      let low = 0;
      let high = this.times.length;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (this.times[middle] <= seconds + 1e-4) low = middle; else high = middle;
      }
      return low;
    }
    return Math.max(0, Math.min(this.nFrames - 1, Math.floor(seconds * this.fps + 1e-3)));
  }

  /** Return a time within a frame, away from its edges, so that no rounding shows a neighbour. */
  timeOf(frame) {
    if (this.times) {
      const start = this.times[frame];
      const end = this.times[frame + 1] ?? start + 1 / this.fps;
      return this.offset + start + Math.min((end - start) / 2, 0.5 / this.fps);
    }
    return this.offset + (frame + 0.5) / this.fps;
  }

  seek(seconds, isMoving = false) {
    this.time = Math.max(0, Math.min(this.duration, seconds));
    for (const medium of this.media) medium.seek(this.time);
    this.emit('time');
    if (!isMoving) this.emit('rest');
  }

  /** Show the next or the previous frame. */
  step(n) {
    this.pause();
    if (this.nFrames) this.seek(this.timeOf(Math.max(0, Math.min(this.nFrames - 1, this.frame + n))));
    else this.seek(this.time + n / 10);
  }

  toggle() { if (this.isPlaying) this.pause(); else this.play(); }

  play() {
    if (this.isPlaying || !this.media.length) return;
    if (this.time >= this.duration - 0.5 / (this.fps || 20)) this.seek(0);
    this.isPlaying = true;
    for (const medium of this.media) { medium.rate(this.speed); medium.play(); }
    this.last = performance.now();
    this.emit('state');
    this.handle = requestAnimationFrame((now) => this.tick(now));
  }

  pause() {
    if (!this.isPlaying) return;
    this.isPlaying = false;
    cancelAnimationFrame(this.handle);
    for (const medium of this.media) medium.pause();
    this.emit('state');
    this.emit('rest');
  }

  setSpeed(speed) {
    this.speed = speed;
    for (const medium of this.media) medium.rate(speed);
    this.emit('state');
  }

  tick(now) {
    if (!this.isPlaying) return;
    const leader = this.media.find((medium) => medium.time !== null && !medium.ended);
    const waits = this.media.some((medium) => !medium.isReady);
    if (leader) this.time = Math.min(this.duration, leader.time);
    else if (!waits) this.time += ((now - this.last) / 1000) * this.speed;
    this.last = now;
    const end = this.loop ? Math.min(this.loop[1], this.duration) : this.duration;
    if (this.time >= end || (!leader && this.media.every((medium) => medium.ended))) {
      if (this.loop) this.seek(this.loop[0], true);
      else { this.time = Math.min(this.time, this.duration); this.emit('time'); this.pause(); return; }
    }
    for (const medium of this.media) {
      if (medium === leader || medium.ended) continue;
      if (medium.time === null || Math.abs(medium.time - this.time) > DRIFT_S * this.speed) medium.seek(this.time);
    }
    this.emit('time');
    this.handle = requestAnimationFrame((each) => this.tick(each));
  }

  emit(name) { this.dispatchEvent(new Event(name)); }

  on(name, run, signal) { this.addEventListener(name, run, { signal }); }

  close() {
    this.isPlaying = false;
    cancelAnimationFrame(this.handle);
    for (const medium of this.media) medium.close?.();
    this.media = [];
  }
}

/** A video or sound element as a medium. */
export class ElementMedium {
  constructor(element, offset = 0) {
    this.element = element;
    this.offset = offset;
    this.wanted = null;
    this.isPlaying = false;
    element.addEventListener('seeked', () => { this.settle(); this.resume(); });
    element.addEventListener('loadedmetadata', () => this.settle());
  }

  get time() { return (this.wanted ?? this.element.currentTime) + this.offset; }
  get ended() { return this.element.ended && !this.element.seeking && this.wanted === null; }
  get isReady() { return this.element.readyState >= 2; }
  get duration() { return this.element.duration; }

  /** Seek, but never while the browser still seeks: the last wish counts. */
  seek(seconds) {
    this.wanted = Math.max(0, seconds - this.offset);
    if (!this.element.seeking && this.element.readyState >= 1) this.settle();
  }

  settle() {
    if (this.wanted === null) return;
    const seconds = this.wanted;
    this.wanted = null;
    if (Math.abs(this.element.currentTime - seconds) > 1e-4) this.element.currentTime = seconds;
  }

  /** Play on after a seek away from the end, where the browser has paused. */
  resume() {
    if (this.isPlaying && this.element.paused && !this.ended) this.play();
  }

  play() {
    this.isPlaying = true;
    this.element.play().catch(() => { /* the element says why by an error event */ });
  }

  pause() {
    this.isPlaying = false;
    this.element.pause();
  }

  rate(value) { this.element.playbackRate = value; }

  close() {
    this.element.pause();
    this.element.removeAttribute('src');
    this.element.load();
  }
}

const MAX_IMAGES = 48;
const AHEAD = 8;

/** Frames that the server decodes, drawn on a canvas: for codecs that the browser lacks. */
export class FrameMedium {
  constructor(canvas, template, fps, nFrames, failed, times = null, offset = 0) {
    Object.assign(this, { canvas, template, fps, nFrames, failed, times, offset });
    this.images = new Map();
    this.frame = -1;
    this.shown = -1;
    this.isPlaying = false;
    this.isClosed = false;
  }

  time = null;
  get ended() { return this.isPlaying && this.frame >= this.nFrames - 1; }
  get isReady() { return this.shown === this.frame; }

  frameAt(seconds) {
    return Clock.prototype.frameAt.call(this, seconds);
  }

  seek(seconds) {
    const frame = this.frameAt(seconds);
    if (frame === this.frame) return;
    this.frame = frame;
    this.show(frame);
  }

  play() {
    this.isPlaying = true;
    if (this.frame >= 0) this.prefetch(this.frame);
  }

  pause() { this.isPlaying = false; }
  rate() { /* the clock's time decides which frame is shown */ }

  load(n) {
    const found = this.images.get(n);
    if (found) { this.images.delete(n); this.images.set(n, found); return found; }
    const image = new Image();
    image.decoding = 'async';
    image.src = this.template.replace('{n}', n);
    const promise = image.decode().then(() => image);
    this.images.set(n, promise);
    promise.catch(() => this.images.delete(n));
    for (const key of this.images.keys()) {
      if (this.images.size <= MAX_IMAGES) break;
      this.images.delete(key);
    }
    return promise;
  }

  prefetch(frame) {
    for (let n = frame + 1; n <= Math.min(this.nFrames - 1, frame + AHEAD); n++) this.load(n).catch(() => { /* told when it is shown */ });
  }

  async show(frame) {
    if (this.isPlaying) this.prefetch(frame);
    try {
      const image = await this.load(frame);
      if (this.isClosed || this.frame !== frame) return;
      if (this.canvas.width !== image.naturalWidth || this.canvas.height !== image.naturalHeight) {
        this.canvas.width = image.naturalWidth;
        this.canvas.height = image.naturalHeight;
      }
      this.canvas.getContext('2d').drawImage(image, 0, 0);
      this.shown = frame;
      this.canvas.dataset.frame = String(frame);
      this.failed(null);
    } catch {
      if (this.isClosed || this.frame !== frame) return;
      this.shown = frame;
      this.failed(frame);
    }
  }

  close() {
    this.isClosed = true;
    this.images.clear();
  }
}
