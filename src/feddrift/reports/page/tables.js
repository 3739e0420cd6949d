// Tables. A column head is [text, kind, title, sort, aria-sort]; with `sort` it is a button.
const HOW = ["", "alarm", "switch", "alarm and switch"];

function table(head, rows, caption) {
  return h(
    "table",
    {},
    caption ? h("caption", {}, caption) : null,
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        head.map(([text, kind, title, sort, sorted]) =>
          h(
            "th",
            { class: kind, scope: "col", title, "aria-sort": sorted },
            sort ? h("button", { type: "button", class: "sort", onclick: sort }, text) : text,
          ),
        ),
      ),
    ),
    h("tbody", {}, rows),
  );
}

const cells = (values, kinds = []) =>
  values.map((value, i) => h("td", { class: kinds[i] }, value instanceof Node ? value : String(value)));

function both(spread, show) {
  if (!spread || !known(spread[0])) return "–";
  return h("span", {}, show(spread[0]), known(spread[1]) ? h("span", { class: "sd" }, ` ± ${show(spread[1])}`) : null);
}

// Finds the run of another algorithm with the same seed and net.
function peer(stream, name, { seed, net }) {
  const groups = stream.groups.filter((g) => g.algorithm === name);
  const run = groups.flatMap((g) => g.runs).find((r) => r.seed === seed && r.net === net);
  return run || null;
}

function detectionTable(view) {
  const { run, stream, group } = view,
    d = run.detection,
    within = view.data.within;
  const head = [
    ["", "text"],
    ["precision"],
    ["recall"],
    ["delay", "", `mean steps; missed counts as ${within + 1}`],
    ["moves"],
    ["false"],
    ["missed"],
  ];
  const exact = (x) => (Number.isInteger(x) ? String(x) : x.toFixed(1));
  const line = (name, v, kind) =>
    h(
      "tr",
      { class: kind },
      cells([
        name,
        number(v.precision),
        number(v.recall),
        number(v.delay),
        exact(v.alarms),
        exact(v.alarms - v.hits),
        exact(v.changes - v.hits),
      ]),
    );
  const rows = [
    line(group.algorithm, d.noticed, "self"),
    line("its alarms alone", d.alarms, "dummy"),
    line("its switches alone", d.switches, "dummy"),
  ];
  for (const name of ["Oracle", "Oblivious"]) {
    const other = name === group.algorithm ? null : peer(stream, name, run);
    if (other && other.detection.noticed) rows.push(line(name, other.detection.noticed));
  }
  rows.push(line("Dummy: a coin, as often", d.chance), line("Dummy: always", d.always), line("Dummy: never", d.never));
  return table(head, rows);
}

// The number of seeds in which this alarm was raised, if there are several.
function agreement({ group }, t, c, how) {
  if (!group.alarms) return [];
  return [how & 1 ? `${group.alarms[`${t},${c}`] || 0} of ${group.runs.length}` : "–"];
}

// The columns with the scores of a move, [name, title, show, key of `evidence`]; none without cells.
function moveColumns({ run, maps }) {
  const [what, show] = asBefore(run);
  const columns = [
    [`${what}, old model`, "of the model that it had, on its new data", show, "old"],
    [`${run.metric}, new model`, "of the model that it moved to, on the same data, before training", (x) => number(x, 3), "now"],
    [`${score.title} next${score.share ? ", %" : ""}`, "of the model that it then had, on the next time step", level, "next"],
  ];
  return maps ? columns.filter(([, , , which]) => which !== "now" || maps.cells.loss) : [];
}

// The rows of all drifts and false moves in order of time.
function driftRows(view) {
  const { run } = view,
    rows = [];
  const reason = (t, c) => (view.maps ? reasons(view.maps, t, c, false).join(" ") : eventsOf(run, t, c));
  const numbers = (t, c) => moveColumns(view).map(([, , show, which]) => show(evidence(view.maps, t, c)[which]));
  for (const [t, c, from, to, delay, how] of run.drifts || []) {
    const tag =
      delay < 0
        ? h("span", { class: "tag bad" }, "missed")
        : h("span", { class: `tag ${delay ? "late" : "good"}` }, delay ? `${count(delay, "step")} late` : "at once");
    rows.push({
      t,
      c,
      kind: delay < 0 ? "missed" : delay ? "late" : "at once",
      values: () => [
        `${letter(from)} → ${letter(to)}`,
        tag,
        delay < 0 ? "–" : HOW[how],
        ...agreement(view, t + Math.max(delay, 0), c, how),
        ...numbers(t + Math.max(delay, 0), c),
        delay >= 0
          ? reason(t + delay, c)
          : view.maps
            ? `It kept model ${view.maps.cells.model[view.maps.at(t, c)]}.`
            : "",
      ],
    });
  }
  for (const [t, c, how] of run.false) {
    const tag = h("span", { class: "tag bad" }, "false");
    rows.push({
      t,
      c,
      kind: run.drifts ? "false" : HOW[how],
      values: () => [
        ...(run.drifts ? ["no change", tag] : []),
        HOW[how],
        ...agreement(view, t, c, how),
        ...numbers(t, c),
        reason(t, c),
      ],
    });
  }
  return rows.sort((a, b) => a.t - b.t || a.c - b.c);
}

function driftList(view, show = 12, only = "all") {
  const cut = (view.run.n_drifts || 0) > (view.run.drifts || []).length || view.run.n_false > view.run.false.length;
  const all = driftRows(view),
    kinds = [...new Set(all.map((r) => r.kind))];
  const rows = all.filter((r) => only === "all" || r.kind === only);
  if (!all.length) return [h("p", { class: "note" }, "No drift, no alarm, no switch.")];
  const open = (r) =>
    h(
      "button",
      { type: "button", class: "link", onclick: () => view.choose(r.t, r.c, true) },
      nameOf(view.stream, r.c),
    );
  const head = [
    ["time", "text"],
    ["client", "text"],
    ...(view.run.drifts
      ? [
          ["concept", "text"],
          ["noticed", "text"],
        ]
      : []),
    ["by", "text"],
    ...(view.group.alarms ? [["alarm in seeds", "text"]] : []),
    ...moveColumns(view).map(([name, title]) => [name, "", title]),
    ["why", "text"],
  ];
  const kind = [...head.slice(0, -1).map(([, of]) => `${of} tight`), "text wide"];
  const { times } = view.run,
    when = (t) => (times[t] ? `${t + 1} · ${times[t]}` : t + 1);
  const again = (n, what) => fill("drifts-list", driftList(view, n, what));
  const filter = h(
    "div",
    { class: "segments" },
    ["all", ...kinds].map((what) =>
      h(
        "button",
        { type: "button", "aria-pressed": String(what === only), onclick: () => again(show, what) },
        `${what} ${what === "all" ? all.length : all.filter((r) => r.kind === what).length}`,
      ),
    ),
  );
  return [
    kinds.length > 1 ? h("div", { class: "controls" }, filter) : null,
    table(
      head,
      rows.slice(0, show).map((r) => h("tr", {}, cells([when(r.t), open(r), ...r.values()], kind))),
    ),
    cut
      ? h(
          "p",
          { class: "note" },
          `The list ends after ${count((view.run.drifts || []).length, "drift")} and ` +
            `${count(view.run.false.length, "other move")}.`,
        )
      : null,
    rows.length > show
      ? h(
          "div",
          { class: "more" },
          h("button", { type: "button", onclick: () => again(show * 4, only) }, "Show more"),
          `${show} of ${rows.length}`,
        )
      : null,
  ];
}

function worstTable(view) {
  const { run, stream, maps } = view,
    oracle = view.group.algorithm === "Oracle" ? null : peer(stream, "Oracle", run);
  const theirs =
    oracle && oracle.cells && run.cells && oracle.steps === run.steps
      ? (c) => {
          const values = range(run.steps)
            .map((t) => oracle.cells.accuracy[t * stream.clients.length + c])
            .filter((v) => v >= 0);
          return values.length ? sum(values) / values.length / 1000 : null;
        }
      : null;
  const head = [
    ["client", "text"],
    [`mean${score.share ? ", %" : ""}`],
    ...(theirs ? [[`Oracle${score.share ? ", %" : ""}`]] : []),
    [run.times.length ? "worst at" : "worst at time"],
    ...(maps ? [["over time", "text"]] : []),
  ];
  const rows = run.worst.slice(0, 8).map(([c, mean, low]) =>
    h(
      "tr",
      {},
      cells(
        [
          h("button", { type: "button", class: "link", onclick: () => view.choose(low, c, true) }, nameOf(stream, c)),
          level(mean),
          ...(theirs ? [level(theirs(c))] : []),
          run.times[low] || low + 1,
          ...(maps ? [spark(maps, c)] : []),
        ],
        ["text", "", "", ...(theirs ? [""] : []), "text"].map((k, i, a) => (i === a.length - 1 ? "text" : k)),
      ),
    ),
  );
  return table(head, rows);
}

// [text, name, show, title, whether lower is better]
const COLUMNS = [
  ["mean", "mean", level, "mean over clients and times"],
  ["omitting drifts", "omitting", level, "without the rows that a drift strikes"],
  ["worst client", "worst", level],
  ["10th pct.", "tenth", level, "10th percentile over clients, from the worst"],
  ["accuracy, %", "accuracy", percent, "how often the models are right"],
  ["majority, %", "majority", percent, "what each client's most frequent class so far would have got"],
  ["log loss", "log_loss", (x) => number(x, 3), "of the probabilities; lower is better", true],
  ["Brier", "brier", (x) => number(x, 3), "Brier score of the probabilities; lower is better", true],
  ["AUC, %", "auc", percent, "area under the ROC curve, one class against the rest"],
  ["balanced, %", "balanced_accuracy", percent, "accuracy if all classes were as frequent"],
  ["F1, %", "f1", percent, "mean over classes"],
  ["precision", "noticed precision", number],
  ["recall", "noticed recall", number],
  ["delay", "noticed delay", number, "", true],
  ["lost to Oracle", "lost_to_oracle", number, "per drift, summed over time steps", true],
  ["lost per drift", "lost", number, "summed over time steps, against the client's own level before", true],
  ["ARI", "ari", number],
  ["NMI", "nmi", number],
  ["spare models", "spare", number, "in use beyond the concepts alive", true],
  ["sent", "sent", number, "relative to one model", true],
  ["MB trained", "bytes training", megabytes, "parameters to and from clients for training, in all", true],
  ["MB scored", "bytes scoring", megabytes, "parameters to clients to be scored, in all", true],
];
const OF_SCORE = ["mean", "omitting", "worst", "tenth"];

// Returns true if a lower value of a column is better.
function lowerIsBetter(name) {
  return OF_SCORE.includes(name) ? !score.higher_is_better : Boolean(COLUMNS.find((column) => column[1] === name)[4]);
}

// Sorts the groups by a column, the best first unless the order is reversed; unknown values are last.
function ranked(groups, name, turned) {
  const value = (g) => (g.numbers[name] || [null])[0],
    sign = lowerIsBetter(name) === turned ? -1 : 1;
  return groups
    .slice()
    .sort((a, b) => known(value(b)) - known(value(a)) || (known(value(a)) ? sign * (value(a) - value(b)) : 0));
}

function comparison(view) {
  const { stream, group } = view;
  const columns = COLUMNS.filter(
    ([, name]) => name !== score.name && stream.groups.some((g) => g.numbers[name] && known(g.numbers[name][0])),
  );
  const [by, turned] = columns.some(([, name]) => name === view.sort[0]) ? view.sort : ["mean", false];
  const rows = ranked(stream.groups, by, turned).map((g) =>
    h(
      "tr",
      { class: g === group ? "self" : null },
      cells([
        g === group ? g.label : h("button", { type: "button", class: "link", onclick: () => view.open(g) }, g.label),
        g.runs.length,
        ...columns.map(([, name, show]) =>
          name === "mean" ? both(g.numbers[name], show) : show((g.numbers[name] || [null])[0]),
        ),
      ]),
    ),
  );
  const d = view.run.detection,
    dummy = (name, v) =>
      h(
        "tr",
        { class: "dummy" },
        cells([name, "", ...columns.map(([, key]) => (key.startsWith("noticed ") ? number(v[key.slice(8)]) : ""))]),
      );
  if (d.noticed) rows.push(dummy("Dummy: always", d.always), dummy("Dummy: never", d.never));
  const named = (text, name) => (name === "mean" ? score.title + (score.share ? ", %" : "") : text);
  const order = (name) => (name !== by ? null : lowerIsBetter(name) === turned ? "descending" : "ascending");
  return table(
    [
      ["", "text"],
      ["seeds"],
      ...columns.map(([text, name, , title]) => [named(text, name), "", title, () => view.sortBy(name), order(name)]),
    ],
    rows,
  );
}
