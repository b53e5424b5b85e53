/** Bars of classes and histograms: elements, so that they can be read, focused and followed. */

import { h, count, counted, number, roving } from './dom.js';

const MAX_BARS = 200;

/** Return bars with their labels; each is `{name, n, href}`. Long lists are searched and cut. */
export function bars(items, label) {
  const list = h('ul', { class: items.length > 14 ? 'bars long' : 'bars', 'aria-label': label });
  const most = Math.max(1, ...items.map((each) => each.n ?? 0));
  const show = (words) => {
    const found = words ? items.filter((each) => each.name.toLowerCase().includes(words)) : items;
    list.replaceChildren(...found.slice(0, MAX_BARS).map((each) => h('li', {}, h('a', { href: each.href, title: each.name },
      h('span', { class: 'label' }, each.name),
      h('span', { class: 'track' }, h('span', { style: { width: `${((each.n ?? 0) / most) * 100}%` } })),
      h('span', { class: 'n' }, count(each.n))))));
    if (found.length > MAX_BARS) list.append(h('li', { class: 'muted' }, `… and ${count(found.length - MAX_BARS)} more`));
    if (!found.length) list.append(h('li', { class: 'muted' }, 'No name has this text.'));
  };
  show('');
  if (items.length <= 24) return list;
  const search = h('input', { type: 'search', placeholder: 'Find a class', 'aria-label': 'Find a class', oninput: () => show(search.value.trim().toLowerCase()) });
  return h('div', { class: 'searched' }, search, list);
}

/**
 * Return a histogram as a figure. `counts[i]` values lie between `edges[i]` and `edges[i + 1]`;
 * `href(low, high)` is where a bar leads, or null. Arrow keys move between bars, and the axis names
 * the bar under the pointer or focus.
 */
export function histogram({ title, edges, counts, stats = '', href = null, inside = null, unit = 'value' }) {
  const most = Math.max(1, ...counts);
  const low = h('span', {}, number(edges[0]));
  const middle = h('span', { 'aria-live': 'polite' });
  const high = h('span', {}, number(edges.at(-1)));
  const name = (i) => `${number(edges[i])} to ${number(edges[i + 1])}: ${counted(counts[i], unit)}`;
  const plot = h('div', { class: 'plot', role: 'group', 'aria-label': `Histogram of ${title}, ${counted(counts.length, 'bar')}` }, counts.map((n, i) => {
    const bar = h(href ? 'a' : 'span', { class: inside?.(edges[i], edges[i + 1]) ? 'bar-of inside' : 'bar-of', href: href ? href(edges[i], edges[i + 1]) : null,
      tabindex: -1, role: href ? null : 'img', 'aria-label': name(i), title: name(i) },
    h('span', { class: 'level', style: { height: n ? `${Math.max(2, (n / most) * 100)}%` : '0' } }));
    const say = () => { low.textContent = ''; high.textContent = ''; middle.textContent = name(i); };
    const rest = () => { low.textContent = number(edges[0]); high.textContent = number(edges.at(-1)); middle.textContent = ''; };
    bar.addEventListener('pointerenter', say);
    bar.addEventListener('pointerleave', rest);
    bar.addEventListener('focus', say);
    bar.addEventListener('blur', rest);
    return bar;
  }));
  roving(plot, '.bar-of');
  return h('figure', { class: 'histogram' },
    title && h('figcaption', {}, h('span', { class: 'title', title }, title), h('span', { class: 'stats' }, stats)),
    plot, h('div', { class: 'axis' }, low, middle, high));
}
