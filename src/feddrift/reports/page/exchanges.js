// Requests to clients on real machines: waiting times, traffic, and missing replies.
const REQUEST_NAMES = {
  hello: ["hello: new data and test", "var(--m5)"],
  evaluate: ["evaluation", "var(--m2)"],
  describe: ["feature statistics", "var(--m1)"],
  reroute: ["choice by inputs", "var(--m7)"],
  contest: ["comparison of models", "var(--m3)"],
  tournament: ["trial of initial models", "var(--m4)"],
  train: ["training", "var(--m0)"],
  explain: ["changes at an alarm", "var(--m6)"],
};

function exchanges() {
  const { run, stream } = view,
    statistics = run.exchanges;
  $("exchanges").hidden = !statistics;
  if (!statistics) return;
  fill(
    "exchanges-note",
    "Seconds for which the server waited for replies in each time step. Of consecutive hellos with the same replies, only " +
      "the first is counted. " +
      `The last request was sent at ${clock(statistics.last)} UTC.`,
  );
  const series = Object.entries(statistics.seconds)
    .filter(([, values]) => sum(values))
    .map(([kind, values]) => {
      const [name, fill] = REQUEST_NAMES[kind] || [kind, "var(--other)"];
      return { name, values, fill };
    });
  fill(
    "exchanges-chart",
    barChart(series, {
      width: widthOf("exchanges-chart", 536),
      height: 230,
      label: "Seconds of waiting for replies",
      xlabel: "time",
      show: (v) => `${number(v, v < 10 ? 1 : 0)} s`,
    }),
    key(series.map(({ name, fill }) => [name, fill])),
  );
  fill("exchanges-clients", tabulateReplies(statistics, stream));
  fill("exchanges-out", listMissingReplies(statistics, stream));
}

// The table of clients; if there are many, the clients with the fewest replies first, then the slowest.
function tabulateReplies(statistics, stream, show = 12) {
  const head = [["client", "text"], ["replies"], ["median, s"], ["slowest, s"], ["MB to"], ["MB from"]];
  const share = (x) => (x.asked ? x.answered / x.asked : 1);
  const all = statistics.clients.map((x, c) => ({ ...x, c }));
  if (all.length > show) all.sort((a, b) => share(a) - share(b) || (b.slowest || 0) - (a.slowest || 0));
  const rows = all
    .slice(0, show)
    .map((x) =>
      h(
        "tr",
        { title: x.trouble },
        cells(
          [
            nameOf(stream, x.c),
            `${x.answered} of ${x.asked}`,
            number(x.median, 1),
            number(x.slowest, 1),
            megabytes(x.to),
            megabytes(x.from),
          ],
          ["text"],
        ),
      ),
    );
  const more = () => fill("exchanges-clients", tabulateReplies(statistics, stream, show * 4));
  return [table(head, rows), all.length > show ? showMore(more, show, all.length) : null];
}

function showMore(more, shown, all) {
  return h(
    "div",
    { class: "more" },
    h("button", { type: "button", onclick: more }, "Show more"),
    `${shown} of ${all}`,
  );
}

function clock(timestamp) {
  return timestamp.slice(0, 19).replace("T", " ");
}

// The table of missing replies and notes, the newest first.
function listMissingReplies(statistics, stream, show = 8) {
  if (!statistics.out.length) return [h("p", { class: "note" }, "None: all requests were answered.")];
  const head = [
    ["when, UTC", "text"],
    ["time", "text"],
    ["client", "text"],
    ["request", "text"],
    ["why", "text"],
  ];
  const kinds = ["text tight", "text tight", "text tight", "text tight", "text wide"];
  const rows = statistics.out
    .slice(-show)
    .reverse()
    .map(([timestamp, t, c, request, round, why]) =>
      h(
        "tr",
        {},
        cells([clock(timestamp), t + 1, nameOf(stream, c), request + (known(round) ? `, round ${round + 1}` : ""), why], kinds),
      ),
    );
  const more = () => fill("exchanges-out", listMissingReplies(statistics, stream, show * 4));
  return [
    table(head, rows),
    statistics.out.length > show ? showMore(more, show, statistics.n_out) : null,
  ];
}
