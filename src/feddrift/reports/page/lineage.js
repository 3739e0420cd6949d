// The lineage of the models: a row for each model, as thick as its share of clients, from its creation to its end.
const MAX_ROWS = 22;

function lineageChart(maps, { width, left }) {
  const { run, n, T, cells, shade } = maps,
    rows = new Map();
  const emptyRow = (m) => ({
    m,
    created: null,
    merged: null,
    parent: null,
    target: null,
    users: new Array(T).fill(0),
    total: 0,
  });
  const rowOf = (m) => rows.get(m) || rows.set(m, emptyRow(m)).get(m);
  cells.model.forEach((m, i) => {
    const l = rowOf(m);
    l.users[Math.floor(i / n)] += 1;
    l.total += 1;
  });
  for (const e of run.events) {
    const l = rowOf(e.model);
    if (e.kind === "created") {
      l.created = e.t;
      l.parent = e.from ?? null;
      l.reason = e.why;
    }
    if (e.kind === "merged") {
      l.merged = e.t;
      l.target = e.into;
      l.endReason = e.why;
    }
    if (e.kind === "retired") {
      l.retired = e.t;
      l.endReason = e.why;
    }
  }
  const all = [...rows.values()].filter((l) => l.total || l.created !== null),
    folded = foldSimilarRows(all, (m) => cells.roots[m] ?? m);
  const shown = folded
    .slice()
    .sort((a, b) => b.total - a.total || a.m - b.m)
    .slice(0, MAX_ROWS)
    .sort((a, b) => a.m - b.m);
  const position = new Map(shown.map((l, i) => [l.m, i]));
  const rowHeight = shown.length > 12 ? 17 : 24,
    height = 14 + rowHeight * shown.length + 24,
    columnWidth = (width - left) / T;
  const x = (t) => left + columnWidth * (t + 0.5),
    y = (m) => 12 + rowHeight * (position.get(m) + 0.5) - 4;
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `Lineage of ${count(all.length, "model")}`,
  });
  for (const l of shown) {
    const used = range(T).filter((t) => l.users[t]),
      start = l.created ?? (used.length ? used[0] : 0);
    const last = used.length ? used[used.length - 1] : start,
      fill = paint(shade.slot(l.m));
    const until = l.target !== null ? l.merged : Math.max(last, start);
    const group = s(
      "g",
      {},
      s(
        "title",
        {},
        [
          l.nModels ? `${l.nModels} models` : `Model ${l.m}`,
          l.reason && !l.nModels ? `created at time ${start + 1}: ${l.reason}` : "",
          l.endReason
            ? `${l.target !== null ? "merged" : "without users"} at time ${(l.merged ?? l.retired) + 1}: ${l.endReason}`
            : "",
        ]
          .filter(Boolean)
          .join("\n"),
      ),
    );
    if (until > start)
      group.append(
        s("line", {
          x1: x(start),
          x2: x(until === l.merged && position.has(l.target) ? until - 0.35 : until),
          y1: y(l.m),
          y2: y(l.m),
          stroke: fill,
          "stroke-width": 1.2,
          "stroke-dasharray": "1 3",
        }),
      );
    used.forEach((t) =>
      group.append(
        s(
          "rect",
          {
            x: x(t) - (t === l.created ? 3 : columnWidth / 2),
            width: t === l.created ? columnWidth / 2 + 3 : columnWidth,
            rx: 1.5,
            fill,
            height: 3 + (rowHeight - 9) * Math.sqrt(l.users[t] / n),
            y: y(l.m) - (3 + (rowHeight - 9) * Math.sqrt(l.users[t] / n)) / 2,
          },
          s(
            "title",
            {},
            `${l.nModels ? `${l.nModels} models` : `Model ${l.m}`}, time ${t + 1}: ${count(l.users[t], "client")}`,
          ),
        ),
      ),
    );
    if (l.parent !== null && position.has(l.parent) && l.created !== null) {
      group.prepend(
        s("path", {
          d: curve(x(start) - columnWidth * 0.5, y(l.parent), x(start), y(l.m)),
          fill: "none",
          stroke: "var(--faint)",
          "stroke-width": 1,
        }),
      );
    }
    if (l.target !== null && position.has(l.target)) {
      const from = x(l.merged) - columnWidth * 0.5;
      group.append(
        s("path", {
          d: curve(from, y(l.m), x(l.merged) - 3, y(l.target)),
          fill: "none",
          stroke: fill,
          "stroke-width": 2,
        }),
      );
    } else if (l.retired !== undefined && last < T - 1 && l.target === null) {
      const cx = x(last) + columnWidth / 2 + 3;
      group.append(s("path", { d: `M${cx},${y(l.m) - 4}v8`, stroke: fill, "stroke-width": 2 }));
    }
    if (l.created !== null)
      group.append(
        s("circle", { cx: x(start), cy: y(l.m), r: 4, fill: "var(--paper)", stroke: fill, "stroke-width": 2 }),
      );
    const name = l.nModels ? `+${l.nModels}` : String(l.m);
    group.append(s("text", { x: left - 10, y: y(l.m) + 4, "text-anchor": "end" }, name));
    svg.append(group);
  }
  for (const t of times(T, width - left, 30)) {
    const half = 3.6 * String(timeMark(t)).length;
    svg.append(s("text", { x: Math.min(x(t), width - half), y: height - 4, "text-anchor": "middle" }, timeMark(t)));
  }
  return { svg, hidden: folded.length - shown.length, all: all.length, folded: shown.some((l) => l.nModels) };
}

// A curve that is horizontal at both ends.
function curve(x0, y0, x1, y1) {
  const bend = (x1 - x0) * 0.75;
  return `M${x0},${y0}C${x0 + bend},${y0} ${x1 - bend},${y1} ${x1},${y1}`;
}

// Joins models with the same creation time, merge time and target into one row, if they are at least five.
function foldSimilarRows(rows, rootOf) {
  const similar = new Map();
  for (const l of rows) {
    const name = l.target === null ? `model ${l.m}` : `${l.created} ${l.merged} ${rootOf(l.m)}`;
    similar.set(name, [...(similar.get(name) || []), l]);
  }
  return [...similar.values()].flatMap((group) =>
    group.length < 5
      ? group
      : [
          {
            ...group[0],
            nModels: group.length,
            target: rootOf(group[0].m),
            users: group[0].users.map((_, t) => sum(group.map((l) => l.users[t]))),
            total: sum(group.map((l) => l.total)),
          },
        ],
  );
}

// Assigns one colour to a model and to all models that merged into it; the least used models share a colour.
function shades(run) {
  const { model, roots } = run.cells,
    used = new Map();
  const root = (m) => roots[m] ?? m;
  for (const m of model) used.set(root(m), (used.get(root(m)) || 0) + 1);
  const ranked = [...used]
    .sort((a, b) => b[1] - a[1] || a[0] - b[0])
    .slice(0, PALETTE)
    .map(([m]) => m)
    .sort((a, b) => a - b);
  const slot = new Map(ranked.map((m, i) => [m, i]));
  const values = range(PALETTE).map((i) => rgb(colour("m" + i))),
    rest = rgb(colour("other"));
  const part = [...new Set(model)].filter((m) => root(m) !== m);
  const named = ranked.map((m) => {
    const parts = part.filter((p) => root(p) === m);
    return [
      `model ${m}` +
        (parts.length ? ` (with ${parts.length <= 4 ? parts.join(", ") : `${parts.length} other models`} merged into it)` : ""),
      paint(slot.get(m)),
    ];
  });
  if (used.size > PALETTE) named.push([count(used.size - PALETTE, "other model"), "var(--other)"]);
  return {
    model: (m) => values[slot.get(root(m))] || rest,
    concept: (k) => values[k] || rest,
    slot: (m) => slot.get(root(m)) ?? -1,
    named,
  };
}
