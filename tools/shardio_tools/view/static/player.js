/** Videos and sound of a sample on one clock, with a timeline on which the clip is marked. */

import { h, fill, about, iconButton, setIcon, clockText, count, bytes, toast } from './dom.js';
import { api, isStatic } from './api.js';
import { Clock, ElementMedium, FrameMedium } from './clock.js';
import { download } from './fields.js';
import { drawn, colour, scrub, timeTicks } from './canvas.js';

const SPEEDS = [0.1, 0.25, 0.5, 1, 1.5, 2, 4];

/** Return a player of the fields, or null if none of them has time. */
export function makePlayer(fields, clip, signal) {
  const videos = fields.filter((field) => field.kind === 'video' && !field.damaged && !field.missing);
  const sounds = fields.filter((field) => field.kind === 'audio' && !field.damaged && !field.missing);
  if (!videos.length && !sounds.length) return null;
  return new Player(videos, sounds, clip, signal);
}

class Player {
  constructor(videos, sounds, clip, signal) {
    this.clock = new Clock();
    this.clip = clip;
    this.signal = signal;
    this.elements = [];
    this.isMuted = true;
    this.lead = videos.find((field) => field.name === clip?.field) ?? videos[0] ?? null;
    this.clock.base = Math.min(...videos.map((video) => video.start ?? 0), ...(videos.length ? [] : [0]));
    if (this.lead?.fps) this.clock.setFrames(this.lead.fps, this.lead.n_frames, this.lead.times ?? null, this.offsetOf(this.lead));
    const cameras = videos.length ? h('div', { class: videos.length > 1 ? 'cameras many' : 'cameras' }, videos.map((field) => this.camera(field))) : null;
    this.hasSound = sounds.length > 0 || videos.some((field) => field.audio);
    this.isMuted = videos.length > 0;
    this.sounds = sounds;
    this.element = h('section', { class: 'player field', 'aria-label': 'Player' }, cameras, this.transport(), this.timeline());
    this.addSounds();
    this.clock.on('time', () => this.showTime(), signal);
    this.clock.on('state', () => this.showState(), signal);
    this.showTime();
    this.showState();
  }

  /* --- what plays --- */

  /** Return how long after the clock a video begins: those of one recording have one zero. */
  offsetOf(field) {
    const offset = (field.start ?? 0) - this.clock.base;
    return offset < (field.seconds || 0) ? offset : 0;
  }

  camera(field) {
    const stage = h('div', { class: 'stage' });
    const facts = [field.codec, field.width && `${field.width} × ${field.height}`, field.fps && `${Number(field.fps.toFixed(2))} fps`, field.n_frames && `${count(field.n_frames)} frames`, field.n_bytes && bytes(field.n_bytes)];
    const node = h('article', { class: 'camera', 'data-field': field.name, 'aria-label': field.name },
      h('header', {}, h('div', {}, h('h2', {}, field.name), ' ', about(facts)), download(field)), stage);
    const video = document.createElement('video');
    const plays = field.src && field.mime && video.canPlayType(field.mime) !== '';
    if (plays) this.native(field, stage, video);
    else this.drawFrames(field, stage, field.mime ? `This browser does not play ${field.codec ?? field.mime}: frames are decoded by shardio.` : 'Frames are decoded by shardio.');
    return node;
  }

  native(field, stage, video) {
    Object.assign(video, { muted: true, playsInline: true, preload: 'auto', src: field.src, tabIndex: -1 });
    video.setAttribute('aria-label', `Video ${field.name}`);
    if (field.width) video.style.aspectRatio = `${field.width} / ${field.height}`;
    const offset = this.offsetOf(field);
    const medium = new ElementMedium(video, offset);
    this.clock.add(medium, field.seconds + offset);
    video.dataset.hasSound = field.audio ? '1' : '';
    this.elements.push(video);
    if (isStatic) video.addEventListener('loadedmetadata', () => this.makeSeekable(field, video), { once: true });
    video.addEventListener('click', () => this.clock.toggle());
    video.addEventListener('dblclick', () => { if (document.fullscreenElement) document.exitFullscreen(); else stage.requestFullscreen?.(); });
    video.addEventListener('seeked', () => { video.dataset.at = String(video.currentTime); });
    video.addEventListener('error', () => {
      if (!video.getAttribute('src')) return;
      const at = this.clock.media.indexOf(medium);
      if (at >= 0) this.clock.media.splice(at, 1);
      this.elements.splice(this.elements.indexOf(video), 1);
      this.clock.pause();
      this.drawFrames(field, stage, `This browser could not play ${field.codec ?? 'the video'}: frames are decoded by shardio.`);
      this.addSounds();
    }, { once: true });
    fill(stage, video);
  }

  /** Load the whole video where the server of an exported site has no ranges. */
  async makeSeekable(field, video) {
    if (video.seekable.length && video.seekable.end(video.seekable.length - 1) > 0) return;
    try {
      const url = await api.whole(field.src, this.signal);
      video.src = url;
      video.addEventListener('loadedmetadata', () => this.clock.seek(this.clock.time), { once: true });
      this.signal.addEventListener('abort', () => URL.revokeObjectURL(url));
    } catch (error) { if (error.name !== 'AbortError') toast(error.message, true); }
  }

  drawFrames(field, stage, reason) {
    const canvas = h('canvas', { width: field.width || 320, height: field.height || 180, role: 'img', 'aria-label': `Video ${field.name}, drawn frame by frame` });
    const how = h('p', { class: 'how' }, reason);
    fill(stage, canvas);
    stage.after(how);
    if (!field.n_frames) {
      how.textContent = 'There are no frames.';
      return;
    }
    if (!field.frames) {
      how.textContent = 'This browser does not play the codec, and an exported page has no decoder.';
      how.classList.add('bad');
      return;
    }
    const medium = new FrameMedium(canvas, field.frames, field.fps || 1, field.n_frames, (frame) => {
      how.classList.toggle('bad', frame !== null);
      how.textContent = frame === null ? reason : `Frame ${count(frame)} cannot be decoded.`;
    }, field.times ?? null, this.offsetOf(field));
    this.clock.add(medium, this.offsetOf(field) + (field.seconds || field.n_frames / (field.fps || 1)));
    canvas.addEventListener('click', () => this.clock.toggle());
    medium.seek(this.clock.time);
  }

  /** Play the fields of sound, unless a video has its sound with it. */
  addSounds() {
    if (this.elements.some((each) => each.dataset.hasSound || each.tagName === 'AUDIO')) return;
    for (const field of this.sounds) {
      const audio = h('audio', { preload: 'auto', src: field.src, 'data-field': field.name });
      this.clock.add(new ElementMedium(audio), field.seconds);
      this.elements.push(audio);
      this.element.append(audio);
    }
  }

  /* --- controls --- */

  transport() {
    const { clock } = this;
    this.playButton = iconButton('play', 'Play', () => clock.toggle(), 'Space');
    this.time = h('span', { class: 'time' });
    this.frame = h('span', { class: 'frame' });
    this.speed = h('select', { 'aria-label': 'Speed', onchange: () => clock.setSpeed(Number(this.speed.value)) }, SPEEDS.map((each) => h('option', { value: each, selected: each === 1 }, `${each}×`)));
    this.soundButton = iconButton('mute', 'Sound on', () => this.toggleSound(), 's');
    this.loopButton = this.clip && h('button', { type: 'button', 'aria-pressed': 'false', onclick: () => this.toggleLoop() }, 'Loop the clip');
    return h('div', { class: 'transport', role: 'group', 'aria-label': 'Transport' },
      iconButton('back', 'One frame back', () => clock.step(-1), ','), this.playButton, iconButton('forward', 'One frame forward', () => clock.step(1), '.'),
      this.time, this.frame, h('div', { class: 'end' }, this.loopButton, this.hasSound && this.soundButton, this.speed));
  }

  timeline() {
    const canvas = h('canvas', {});
    this.slider = h('div', { class: 'timeline', role: 'slider', tabindex: 0, 'aria-label': 'Time', 'aria-valuemin': 0, 'aria-valuemax': Number(this.clock.duration.toFixed(3)) }, canvas);
    this.redraw = drawn(canvas, (context, width, height) => this.draw(context, width, height), this.signal);
    scrub(this.slider, (fraction, isMoving) => { this.clock.pause(); this.clock.seek(fraction * this.clock.duration, isMoving); }, (n) => this.clock.step(n));
    const hasKeys = this.keyframes.length > 1;
    const legend = (this.clip || hasKeys) && h('p', { class: 'timeline-legend' },
      this.clip && h('span', {}, h('i', {}), this.clip.text ?? `the clip of the view: ${count(this.clip.n_frames)} frames`), hasKeys && h('span', {}, h('i', { class: 'key' }), 'keyframe'));
    return h('div', {}, this.slider, legend);
  }

  /** The keyframes of the video that leads; none if each frame is one, as in JPEG. */
  get keyframes() {
    const found = this.lead?.keyframes ?? [];
    return found.length < (this.lead?.n_frames ?? 0) ? found : [];
  }

  draw(context, width, height) {
    const { duration, time } = this.clock;
    if (!duration) return;
    const x = (seconds) => (seconds / duration) * width;
    const y = 8;
    context.fillStyle = colour('bg-hover');
    context.fillRect(0, y, width, 8);
    if (this.clip) {
      context.fillStyle = colour('accent-soft');
      context.fillRect(x(this.clip.start), y - 4, Math.max(2, x(this.clip.stop) - x(this.clip.start)), 15);
      context.strokeStyle = colour('accent');
      context.strokeRect(x(this.clip.start) + 0.5, y - 3.5, Math.max(1, x(this.clip.stop) - x(this.clip.start) - 1), 14);
    }
    context.fillStyle = colour('accent-fill');
    context.fillRect(0, y + 2, x(time), 4);
    context.fillStyle = colour('line-strong');
    for (const frame of this.keyframes) context.fillRect(Math.round(x(this.clock.times?.[frame] ?? frame / this.lead.fps)), y, 1, 8);
    context.fillStyle = colour('ink-3');
    context.font = `11px ${colour('sans')}`;
    context.textBaseline = 'bottom';
    const times = timeTicks(duration, width);
    for (const seconds of times) {
      const text = clockText(seconds, times[1] < 1 ? (times[1] < 0.1 ? 2 : 1) : 0);
      const size = context.measureText(text).width;
      if (x(seconds) + size <= width) context.fillText(text, x(seconds) ? x(seconds) - size / 2 : 0, height);
    }
    context.fillStyle = colour('ink');
    context.fillRect(Math.min(width - 2, Math.max(0, x(time) - 1)), 1, 2, 20);
  }

  showTime() {
    const { clock } = this;
    fill(this.time, clockText(clock.time), h('span', {}, ` / ${clockText(clock.duration)}`));
    this.frame.textContent = clock.nFrames ? `frame ${count(clock.frame)} / ${count(clock.nFrames - 1)}` : '';
    this.slider.setAttribute('aria-valuenow', clock.time.toFixed(3));
    this.slider.setAttribute('aria-valuetext', `${clockText(clock.time)}${clock.nFrames ? `, frame ${clock.frame}` : ''}`);
    this.redraw();
  }

  showState() {
    setIcon(this.playButton, this.clock.isPlaying ? 'pause' : 'play', this.clock.isPlaying ? 'Pause' : 'Play', 'Space');
    setIcon(this.soundButton, this.isMuted ? 'mute' : 'sound', this.isMuted ? 'Sound on' : 'Sound off', 's');
    for (const [i, element] of this.elements.entries()) element.muted = this.isMuted || (i > 0 && element.tagName === 'VIDEO');
  }

  toggleSound() {
    this.isMuted = !this.isMuted;
    this.showState();
  }

  toggleLoop() {
    const isOn = this.clock.loop === null;
    this.clock.loop = isOn ? [this.clip.start, this.clip.stop] : null;
    this.loopButton.setAttribute('aria-pressed', String(isOn));
    if (isOn && (this.clock.time < this.clip.start || this.clock.time >= this.clip.stop)) this.clock.seek(this.clip.start);
  }

  key(event) {
    const { clock } = this;
    if (event.key === ' ') clock.toggle();
    else if (event.key === ',') clock.step(-1);
    else if (event.key === '.') clock.step(1);
    else if (event.shiftKey && event.key === 'ArrowRight') clock.seek(clock.time + 1);
    else if (event.shiftKey && event.key === 'ArrowLeft') clock.seek(clock.time - 1);
    else if (event.key === '[') clock.seek(this.clip?.start ?? 0);
    else if (event.key === ']') clock.seek(this.clip ? Math.max(this.clip.start, this.clip.stop - 0.5 / (clock.fps || 20)) : clock.duration);
    else if (event.key === 's' && this.hasSound) this.toggleSound();
    else return false;
    return true;
  }

  close() { this.clock.close(); }
}
