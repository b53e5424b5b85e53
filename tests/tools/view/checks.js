// Checks that tests run in the viewer's page.

/** Return whether anything is wider than the screen, and the controls that are not entirely visible. */
function overflow() {
  const main = document.getElementById('main');
  const isWide = document.documentElement.scrollWidth > innerWidth || main.scrollWidth > main.clientWidth;
  const cut = [];
  for (const node of document.querySelectorAll('button, select, input, .tabs a, h1, h2')) {
    if (!node.checkVisibility() || node.closest('.table, [role=list], .legend, .choices')) continue;
    const box = node.getBoundingClientRect();
    const isCut = node.tagName === 'BUTTON' && node.scrollWidth > node.clientWidth + 1;
    if (isCut || box.left < -0.5 || box.right > innerWidth + 0.5) cut.push(node.outerHTML.slice(0, 120));
  }
  return { isWide, cut };
}

/** Return the relative luminance and the opacity of a colour. */
function luminance(text) {
  const [r, g, b, alpha = 1] = text.match(/[\d.]+/g).map(Number);
  const linear = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return [0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b), alpha];
}

/** Return the texts whose contrast with what is behind them is under 4.5. */
function faint() {
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const [found, alpha] = luminance(getComputedStyle(each).backgroundColor);
      if (alpha === 1) return found;
    }
    return 1;
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const text = [...node.childNodes].filter((each) => each.nodeType === 3).map((each) => each.data.trim()).join('');
    if (!text || node.matches(':disabled') || !node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const [front] = luminance(getComputedStyle(node).color);
    const back = behind(node);
    const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (contrast < 4.5) found.push(`${contrast.toFixed(2)} ${text.slice(0, 40)}`);
  }
  return found;
}

/** Return what has the focus, and whether that can be seen. */
function focusStop() {
  const node = document.activeElement;
  const { outlineStyle, outlineWidth } = getComputedStyle(node);
  const shadow = getComputedStyle(node.querySelector('.picture') ?? node).boxShadow;
  return [node.outerHTML.slice(0, 200), (outlineStyle !== 'none' && outlineWidth !== '0px') || shadow !== 'none'];
}

/** Return the frames that the videos show, at a frame rate. */
function frames(rate) {
  return [...document.querySelectorAll('video')].map((video) => Math.floor(video.currentTime * rate + 1e-3));
}

/** Return the position of the first sample that is visible. */
function firstPosition() {
  const { left, top } = document.querySelector('.window').getBoundingClientRect();
  const shown = [...document.querySelectorAll('.window [data-position]')].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.bottom > top + 1 && box.right > left;
  });
  return Math.min(...shown.map((each) => Number(each.dataset.position)));
}

/** Return the number of samples in the first line of the grid. */
function columns() {
  const tops = [...document.querySelectorAll('.tile')].map((each) => each.getBoundingClientRect().top);
  return tops.filter((top) => top === Math.min(...tops)).length;
}

/** Return where links lead. */
function links(selector) {
  return [...document.querySelectorAll(selector)].map((each) => each.getAttribute('href'));
}

/** Return the samples of one of the epochs, as links. */
function batch(panel) {
  const links = document.querySelectorAll(`.epochs > section:nth-child(${panel}) .samples a`);
  return [...links].map((each) => each.getAttribute('href'));
}

/** Return whether a canvas shows a frame, and has pixels. */
function draws(field, frame) {
  const canvas = document.querySelector(`.camera[data-field="${field}"] canvas`);
  if (canvas.dataset.frame !== String(frame)) return false;
  const [, , , alpha] = canvas.getContext('2d').getImageData(canvas.width / 2, canvas.height / 2, 1, 1).data;
  return alpha === 255;
}
