// Draws the report's charts with uPlot. A drag zooms all of them, a double click shows everything again. Times are UTC.
(() => {
  "use strict";
  const { t, charts, lanes, steps } = JSON.parse(document.getElementById("data").textContent);
  const box = document.getElementById("charts");
  const plots = [];
  const width = () => Math.max(300, box.clientWidth);
  const figure = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(5))));
  const when = (seconds) => (seconds ? new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") : "–");

  const ticks = (plot, splits) => splits.map((at) => when(at).slice(...(plot.scales.x.max - plot.scales.x.min > 86400 ? [5, 16] : [11, 16])));

  function draw(title, series, columns, { height = 220, range, label = figure, drawn = () => {} } = {}) {
    const place = document.createElement("figure");
    place.append(Object.assign(document.createElement("figcaption"), { textContent: title }));
    box.append(place);
    plots.push(new uPlot({
      width: width(), height, tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      legend: { show: series.length > 0 },
      cursor: { sync: { key: "report", setSeries: false } },
      scales: {
        x: { range: (plot, low, high) => (low === high ? [low - 60, high + 60] : [low, high]) },
        y: { range: (plot, low, high) => range ?? [0, (high || 1) * 1.05] },
      },
      axes: [{ values: ticks }, { size: 110, splits: range && (() => lanes.map((lane, at) => at)), values: (plot, splits) => splits.map(label) }],
      series: [{ label: "time", value: (plot, seconds) => when(seconds) }, ...series],
      hooks: { draw: [drawn] },
    }, [t, ...columns], place));
  }

  function drawnSteps({ ctx, bbox, valToPos }) {
    Object.assign(ctx, { font: `${12 * devicePixelRatio}px sans-serif`, textAlign: "center", textBaseline: "middle" });
    for (const [at, lane, up, color] of steps) {
      const x = valToPos(at, "x", true);
      ctx.fillStyle = color;
      if (x >= bbox.left && x <= bbox.left + bbox.width) ctx.fillText(up ? "▲" : "▼", x, valToPos(lane, "y", true));
    }
  }

  if (steps.length) {
    draw("Decisions with a step (▲ up, ▼ down; red: refused, blue: waits for a GPU)", [], [],
      { height: 60 + 24 * lanes.length, range: [-0.5, lanes.length - 0.5], label: (at) => lanes[at] ?? "", drawn: drawnSteps });
  }
  for (const { title, series } of charts) {
    draw(title, series.map((each) => ({
      label: each.label, stroke: each.color, width: 1.2, dash: each.dashed ? [6, 4] : [], value: (plot, value) => figure(value),
      spanGaps: !each.steps, paths: each.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: t.length === 1 },
    })), series.map((each) => each.values));
  }
  addEventListener("resize", () => plots.forEach((plot) => plot.setSize({ width: width(), height: plot.height })));
})();
