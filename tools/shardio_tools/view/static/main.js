/** The shell: bar, pages by hash, and keys that work everywhere. */

import { h, fill, icon, iconButton, errorBox, toast, count } from './dom.js';
import { parse, link, go, filtersOf, isSettled, settle } from './route.js';
import { store, loadDataset, loadMarks, onMarks } from './store.js';
import { isStatic } from './api.js';
import { show as overview } from './overview.js';
import { show as grid } from './grid.js';
import { show as sample } from './sample.js';
import { show as loader } from './loader.js';
import { show as damage } from './damage.js';
import { show as marks } from './marks.js';
import { toggleHelp, isHelpOpen } from './help.js';
import { watchGeneration } from './generation.js';

const PAGES = { overview, grid, sample, loader, damage, marks };
const SECTIONS = [['overview', 'Overview', 'o'], ['grid', 'Samples', 'g'], ['loader', 'Loader', 'l'], ['damage', 'Damage', 'd'], ['marks', 'Marks', 'b']];
const TITLES = Object.fromEntries(SECTIONS);
const main = document.getElementById('main');
let current = null;
let lastGrid = '#/grid';
const tabs = new Map();

function makeBar() {
  const sections = SECTIONS.filter(([page]) => !(isStatic && ['loader', 'damage', 'marks'].includes(page)));
  const nav = h('nav', { class: 'tabs', 'aria-label': 'Sections' }, sections.map(([page, name, key]) => {
    const tab = h('a', { href: link(page), title: `${name} (${key})`, 'aria-keyshortcuts': key }, name);
    if (page === 'grid') tab.addEventListener('click', (event) => { event.preventDefault(); go(lastGrid); });
    if (page === 'marks') tab.append(h('span', { class: 'badge', hidden: true, id: 'mark-count' }));
    tabs.set(page, tab);
    return tab;
  }));
  const jump = h('input', { type: 'text', inputmode: 'numeric', id: 'jump', class: 'jump', placeholder: 'Go to row', 'aria-label': 'Go to row', title: 'Go to row (r)', autocomplete: 'off', size: 9 });
  const form = h('form', { class: 'jump-form', onsubmit: (event) => { event.preventDefault(); jumpTo(jump); } }, jump);
  fill(document.getElementById('bar'),
    h('a', { class: 'brand', href: '#/', title: store.dataset.path }, h('img', { src: 'static/icon.svg', alt: '', width: 16, height: 16 }), h('span', {}, store.dataset.name)),
    nav, h('div', { class: 'bar-end' }, form,
      iconButton('link', 'Copy a link to this page', copyLink, 'c'),
      h('button', { type: 'button', class: 'icon-button', 'aria-label': 'Help and keys', title: 'Help and keys (?)', 'aria-keyshortcuts': '?', onclick: toggleHelp }, '?')));
  onMarks(showMarkCount);
  showMarkCount();
}

function showMarkCount() {
  const badge = document.getElementById('mark-count');
  if (!badge) return;
  badge.hidden = store.marks.size === 0;
  badge.textContent = count(store.marks.size);
}

function jumpTo(input) {
  const text = input.value.replaceAll(/[,_\s]/g, '');
  const n = store.dataset.n_samples;
  const row = /^-?\d+$/.test(text) ? Number(text) + (text.startsWith('-') ? n : 0) : NaN;
  if (!(row >= 0 && row < n)) return toast(n ? `Rows are 0 to ${count(n - 1)}.` : 'The dataset has no samples.', true);
  input.value = '';
  input.blur();
  if (current?.page === 'grid') current.view.jump(row); else go(link('sample', row));
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    toast('Copied the link to this page.');
  } catch { toast('The browser does not let the page copy: the link is in the address bar.', true); }
}

function navigate() {
  settle();
  const route = parse(location.hash);
  if (!Object.hasOwn(PAGES, route.page)) route.page = 'overview';
  if (current?.page === 'grid') lastGrid = current.view.hash({}); // as it was scrolled
  if (route.page === 'grid') lastGrid = location.hash;
  if (route.page === 'sample') lastGrid = link('grid', null, { ...filtersOf(route.params), at: route.params.get('at') });
  for (const [page, tab] of tabs) {
    if (page === route.page || (page === 'grid' && route.page === 'sample')) tab.setAttribute('aria-current', 'page');
    else tab.removeAttribute('aria-current');
  }
  document.title = `${TITLES[route.page] ?? `Sample ${route.args[0] ?? ''}`} – ${store.dataset.name}`;
  if (current && current.page === route.page && current.view.update?.(route)) return;
  current?.abort.abort();
  current?.view.close?.();
  const abort = new AbortController();
  const root = h('div', { class: `page page-${route.page}` });
  fill(main, root);
  main.scrollTop = 0;
  const view = PAGES[route.page](root, route, abort.signal);
  current = { page: route.page, view, abort };
  if (document.activeElement === document.body) main.focus({ preventScroll: true }); // Tab goes on in the new page
}

const EDITABLE = 'input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select, [contenteditable]';

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const inEditor = event.target instanceof Element && event.target.matches(EDITABLE);
  if (event.key === 'Escape' && inEditor) return event.target.blur();
  if (inEditor || isHelpOpen()) return;
  const native = { ' ': 'button, summary', Enter: 'a[href], button, summary' }[event.key];
  if (native && event.target instanceof Element && event.target.closest(native)) return;
  if (current?.view.key?.(event)) return event.preventDefault();
  const section = SECTIONS.find(([page, , key]) => key === event.key && tabs.has(page));
  if (section) go(section[0] === 'grid' ? lastGrid : link(section[0]));
  else if (event.key === '?') toggleHelp();
  else if (event.key === 'c') copyLink();
  else if (event.key === 'r') document.getElementById('jump').focus();
  else if (event.key === '/') {
    if (current?.page !== 'grid') { go(lastGrid); navigate(); } // now: the next keys are search words
    current.view.search();
  } else return;
  event.preventDefault();
}

document.querySelector('.skip').addEventListener('click', (event) => { event.preventDefault(); main.focus(); });

async function start() {
  fill(main, h('div', { class: 'page' }, h('p', { class: 'muted', 'aria-busy': 'true' }, 'Opening the dataset …')));
  try {
    await loadDataset();
  } catch (error) {
    fill(main, h('div', { class: 'page' }, h('h1', {}, 'The dataset cannot be shown'), errorBox(error, start)));
    return;
  }
  makeBar();
  window.addEventListener('hashchange', () => { if (!isSettled()) navigate(); });
  document.addEventListener('keydown', onKey);
  navigate();
  watchGeneration();
  loadMarks().catch((error) => toast(error.message, true));
}

start();
