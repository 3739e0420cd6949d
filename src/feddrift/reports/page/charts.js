// Line and bar charts as SVG with common axes.
const LETTER_WIDTH_PX = 8; // approximate maximum, of a letter of a label
const MIN_WIDTH_FOR_NAMES_PX = 480; // of a chart with the names of lines at their ends

// Returns the width for the names of lines at their ends, in pixels.
const labelWidth = (names, limit) =>
  Math.min(limit, 20 + LETTER_WIDTH_PX * Math.max(...names.map((name) => name.length)));

function ticks(low, high, n = 6) {
  const raw = (high - low) / n || 1;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * base).find((m) => m >= raw);
  const values = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) values.push(v);
  return values;
}

function frame({ width, height, x, y, label, left = 44, right = 12, top = 10, bottom = 34 }) {
  const scale = {
    x: (v) => left + ((v - x[0]) / (x[1] - x[0] || 1)) * (width - left - right),
    y: (v) => height - bottom - ((v - y[0]) / (y[1] - y[0] || 1)) * (height - top - bottom),
  };
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  return { svg, scale, left, right, top, bottom, width, height };
}

function axes(f, { xs, ys, xlabel, show = (v) => v, showX = (v) => v }) {
  for (const v of ys) {
    f.svg.append(
      s("line", { class: "axis", x1: f.left, x2: f.width - f.right, y1: f.scale.y(v), y2: f.scale.y(v) }),
      s("text", { x: f.left - 8, y: f.scale.y(v) + 4, "text-anchor": "end" }, String(show(v))),
    );
  }
  for (const v of xs) {
    const text = String(showX(v)),
      x = Math.min(f.scale.x(v), f.width - (LETTER_WIDTH_PX * text.length) / 2); // the last label ends with the chart
    f.svg.append(s("text", { x, y: f.height - f.bottom + 18, "text-anchor": "middle" }, text));
  }
  const beside = xlabel && xlabel.length < 6; // a word fits before the first number, a sentence is placed below
  const place = beside
    ? { x: f.left - 12, y: f.height - f.bottom + 18, "text-anchor": "end" }
    : { x: f.left, y: f.height - 1 };
  if (xlabel && !(beside && timeNames())) f.svg.append(s("text", place, xlabel)); // names of time steps need no axis label
}

// The label of a time step: its name if all time steps have short names, else its number from 1.
const MAX_TIME_NAME_LETTERS = 12;
function timeNames() {
  const names = view.run.times;
  return names.length && names.every((name) => name && name.length <= MAX_TIME_NAME_LETTERS) ? names : null;
}
const timeMark = (t) => (timeNames() ? timeNames()[t] ?? t + 1 : t + 1);

// The time steps that get a label, so that labels do not overlap.
function times(n, width, minGap = 26) {
  const longest = Math.max(0, ...(timeNames() || []).map((name) => name.length));
  const interval = Math.max(1, Math.ceil((n * Math.max(minGap, 10 * longest + 8)) / width));
  return range(n).filter((t) => t % interval === 0);
}

function path(points, scale) {
  let text = "",
    pen = "M";
  for (const [x, y] of points) {
    if (!known(y)) {
      pen = "M";
      continue;
    }
    text += `${pen}${scale.x(x).toFixed(1)},${scale.y(y).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

function band(low, high, scale) {
  const runs = [[]];
  low.forEach((v, i) => (known(v) && known(high[i]) ? runs[runs.length - 1].push(i) : runs.push([])));
  return runs
    .filter((run) => run.length > 1)
    .map(
      (run) =>
        "M" +
        run.map((i) => `${scale.x(i).toFixed(1)},${scale.y(high[i]).toFixed(1)}`).join("L") +
        "L" +
        run
          .slice()
          .reverse()
          .map((i) => `${scale.x(i).toFixed(1)},${scale.y(low[i]).toFixed(1)}`)
          .join("L") +
        "Z",
    )
    .join("");
}

// Moves the labels at the ends of lines until they do not overlap.
function spreadLabels(labels, gap, low, high) {
  const placed = labels.slice().sort((a, b) => a.y - b.y);
  placed.forEach((l, i) => {
    l.y = Math.max(l.y, i ? placed[i - 1].y + gap : low);
  });
  for (let i = placed.length - 1; i >= 0; i--) {
    placed[i].y = Math.min(placed[i].y, i === placed.length - 1 ? high : placed[i + 1].y - gap);
  }
  return placed;
}

// lines: {name, values, low?, high?, stroke, dash?, strong, point?}; x counts from 0. The names of lines are at their
// ends, or below a chart that has no room for them there.
function lineChart(
  lines,
  {
    width,
    height,
    label,
    xlabel,
    show,
    showX,
    xs,
    floor = null,
    ceiling = null,
    maxLabelWidth = 180,
    marks = null,
    whole = false,
  },
) {
  const all = lines
    .flatMap((l) => [...l.values, ...(l.strong ? [...(l.low || []), ...(l.high || [])] : [])])
    .filter(known);
  if (!all.length) return h("p", { class: "note" }, "There are no values yet.");
  let [low, high] = [Math.min(...all), Math.max(...all)];
  const pad = Math.max((high - low) * 0.06, whole ? 0.6 : 0.015);
  low = known(floor) ? Math.max(low - pad, floor) : low - pad;
  high = known(ceiling) ? Math.min(high + pad, ceiling) : high + pad;
  const n = Math.max(2, ...lines.map((l) => l.values.length));
  const named = lines.filter((l) => l.strong && l.values.some(known)),
    namesBelow = width < MIN_WIDTH_FOR_NAMES_PX,
    right = namesBelow
      ? 12
      : labelWidth(
          named.map((l) => l.name),
          maxLabelWidth,
        );
  const f = frame({ width, height, x: [0, n - 1], y: [low, high], label, right });
  axes(f, {
    xs: xs || times(n, width - f.left - right),
    ys: ticks(low, high).filter((v) => !whole || Number.isInteger(v)),
    xlabel,
    show,
    showX: showX || timeMark,
  });
  if (known(marks))
    f.svg.append(
      s("line", {
        x1: f.scale.x(marks),
        x2: f.scale.x(marks),
        y1: f.top,
        y2: height - f.bottom,
        stroke: "var(--faint)",
        "stroke-dasharray": "2 3",
      }),
    );
  for (const l of lines.slice().sort((a, b) => a.strong - b.strong)) {
    if (l.low && l.strong) f.svg.append(s("path", { d: band(l.low, l.high, f.scale), fill: l.stroke, opacity: 0.14 }));
    f.svg.append(
      s(
        "path",
        {
          d: path(
            l.values.map((v, i) => [i, v]),
            f.scale,
          ),
          fill: "none",
          stroke: l.stroke,
          "stroke-width": l.strong ? 2.2 : 1.2,
          "stroke-dasharray": l.dash,
          opacity: l.strong ? 1 : 0.45,
          "stroke-linejoin": "round",
          "stroke-linecap": "round",
        },
        s("title", {}, l.name),
      ),
    );
    if (l.strong && n <= 40) {
      l.values.forEach(
        (v, i) => known(v) && f.svg.append(s("circle", { cx: f.scale.x(i), cy: f.scale.y(v), r: 2.6, fill: l.stroke })),
      );
    }
  }
  if (namesBelow) return h("div", {}, f.svg, lineKey(named));
  const ends = named.map((l) => {
    const i = l.values.findLastIndex(known);
    return { text: l.name, stroke: l.stroke, from: f.scale.y(l.values[i]), y: f.scale.y(l.values[i]), x: f.scale.x(i) };
  });
  for (const l of spreadLabels(ends, 16, f.top + 2, height - f.bottom)) {
    const x = width - right + 14;
    if (Math.abs(l.y - l.from) > 3 || l.x < width - right - 1) {
      f.svg.append(
        s("path", { d: `M${l.x + 4},${l.from}L${x - 3},${l.y}`, stroke: l.stroke, opacity: 0.5, fill: "none" }),
      );
    }
    const text = shortenMiddle(l.text, Math.floor((right - 14) / LETTER_WIDTH_PX));
    f.svg.append(s("text", { class: "name", x, y: l.y + 4, style: `fill:${l.stroke}` }, text, s("title", {}, l.text)));
  }
  return f.svg;
}

// The names of lines, each beside a piece of its line.
function lineKey(lines) {
  const piece = (l) =>
    s(
      "svg",
      { class: "piece", viewBox: "0 0 24 10", "aria-hidden": "true" },
      s("path", { d: "M0,5H24", stroke: l.stroke, "stroke-width": 2.2, "stroke-dasharray": l.dash }),
    );
  return h(
    "div",
    { class: "key" },
    lines.map((l) => h("span", {}, piece(l), l.name)),
  );
}

// Stacked bars over time: series {name, values, fill}; bars of negative values are below the axis.
function barChart(series, { width, height, label, xlabel, show, line = null }) {
  const n = Math.max(1, ...series.map((b) => b.values.length));
  const up = range(n).map((t) => sum(series.map((b) => Math.max(0, b.values[t] || 0))));
  const down = range(n).map((t) => sum(series.map((b) => Math.min(0, b.values[t] || 0))));
  const y = [Math.min(0, ...down), Math.max(1, line || 0, ...up) * 1.06];
  const f = frame({ width, height, x: [-0.5, n - 0.5], y, label });
  axes(f, {
    xs: times(n, width - f.left),
    ys: ticks(y[0], y[1], 4).filter((v) => show || Number.isInteger(v)),
    xlabel,
    show: show || Math.abs,
    showX: timeMark,
  });
  const w = Math.min(34, ((width - f.left - f.right) / n) * 0.66);
  for (const t of range(n)) {
    let [above, below] = [0, 0];
    for (const b of series) {
      const v = b.values[t] || 0;
      if (!v) continue;
      const [from, to] = v > 0 ? [above, (above += v)] : [below, (below += v)];
      f.svg.append(
        s(
          "rect",
          {
            x: f.scale.x(t) - w / 2,
            width: w,
            y: Math.min(f.scale.y(from), f.scale.y(to)),
            height: Math.max(1, Math.abs(f.scale.y(from) - f.scale.y(to)) - 1),
            fill: b.fill,
            rx: 1.5,
          },
          s("title", {}, `time ${t + 1}: ${show ? show(v) : Math.abs(v)} ${b.name}`),
        ),
      );
    }
  }
  if (y[0] < 0)
    f.svg.append(s("line", { class: "axis ink", x1: f.left, x2: width - f.right, y1: f.scale.y(0), y2: f.scale.y(0) }));
  if (known(line))
    f.svg.append(
      s("line", {
        x1: f.left,
        x2: width - f.right,
        y1: f.scale.y(line),
        y2: f.scale.y(line),
        stroke: "var(--ink)",
        "stroke-dasharray": "3 3",
      }),
    );
  return f.svg;
}

function key(entries) {
  return h(
    "div",
    { class: "key" },
    entries.map(([text, fill]) => h("span", {}, h("i", { class: "swatch", style: `background:${fill}` }), text)),
  );
}
