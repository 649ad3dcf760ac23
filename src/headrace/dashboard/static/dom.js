// Elements, and canvases that are as sharp as the screen. Texts go in as text, never as HTML.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "style") for (const [key, set] of Object.entries(value)) node.style.setProperty(key, set);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function swatch(colour, dash) {
  return el("span", { class: dash ? "swatch dashed" : "swatch", style: { "--colour": colour }, "aria-hidden": "true" });
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A canvas that fills its parent's width, is `height` high, and is drawn again when its size changes.
export function picture(height, label, draw) {
  const canvas = el("canvas", { role: "img", "aria-label": label, style: { height: `${height}px` } });
  const node = el("div", { class: "picture" }, canvas);
  const made = { node, canvas, width: 0, height, redraw };
  function redraw() {
    const width = node.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    made.width = width;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(made.height * ratio);
    canvas.style.height = `${made.height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, made.height);
    context.font = `11px ${css("--font")}`;
    draw(context, width, made.height);
  }
  new ResizeObserver(() => { if (node.clientWidth !== made.width) redraw(); }).observe(node);
  return made;
}

// Where the pointer is says what is there; `find` returns the text, or null.
export function tooltip(made, find) {
  const tip = el("div", { class: "tip", hidden: true });
  made.node.append(tip);
  made.canvas.addEventListener("pointermove", (event) => {
    const box = made.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, text = find(x, event.clientY - box.top);
    tip.hidden = text === null;
    if (text === null) return;
    tip.textContent = text;
    tip.style.left = `${Math.max(0, Math.min(x + 12, made.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - box.top + 14}px`;
  });
  made.canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
}
