"""What makes the page interactive: a shared cross hair with all values, zoom by dragging, reasons of decisions.

Texts of the log (a plugin's reason is one) only ever become text, never markup.
"""

SCRIPT = """
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const [began, ended] = [data.times[0], data.times[data.times.length - 1]];
const WIDTH = 10000;
let view = [0, WIDTH];
const tip = document.getElementById('tip');
const charts = [...document.querySelectorAll('svg.chart')];

function timeAt(x) { return began + (ended - began) * x / WIDTH; }
function xOf(time) { return ended > began ? WIDTH * (time - began) / (ended - began) : WIDTH / 2; }
function told(time) { return new Date(time * 1000).toISOString().slice(5, 19).replace('T', ' '); }
function rounded(value) {
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString('en') : String(Number(value.toPrecision(4)));
}

function nearest(times, time) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < time) low = middle + 1; else high = middle;
  }
  return low > 0 && time - times[low - 1] < times[low] - time ? low - 1 : low;
}

function show() {
  for (const chart of charts) {
    const curves = chart.querySelector('svg.curves');
    const height = curves.viewBox.baseVal.height;
    curves.setAttribute('viewBox', `${view[0]} 0 ${view[1] - view[0]} ${height}`);
    const labels = [...chart.querySelectorAll('text.time')];
    const days = timeAt(view[1]) - timeAt(view[0]) >= 86400;
    labels.forEach((label, n) => {
      const time = told(timeAt(view[0] + (view[1] - view[0]) * n / (labels.length - 1)));
      label.textContent = n === 0 || n === labels.length - 1 ? time : days ? time.slice(0, 11) : time.slice(6);
    });
  }
}

function xAt(area, event) {
  const box = area.getBoundingClientRect();
  return view[0] + (view[1] - view[0]) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
}

function mark(x, name) {
  for (const chart of charts) {
    const curves = chart.querySelector('svg.curves');
    let line = curves.querySelector('.' + name);
    if (!line) {
      line = document.createElementNS('http://www.w3.org/2000/svg', 'line');
      line.setAttribute('class', name);
      line.setAttribute('y1', '0');
      line.setAttribute('y2', '1000');
      line.setAttribute('stroke', '#777');
      line.setAttribute('vector-effect', 'non-scaling-stroke');
      curves.append(line);
    }
    line.setAttribute('x1', x);
    line.setAttribute('x2', x);
  }
}

function unmark(name) { document.querySelectorAll('.' + name).forEach(line => line.remove()); }

function fill(lines) {
  tip.replaceChildren(...lines.map(([text, color]) => {
    const row = document.createElement('div');
    if (color) {
      const dot = document.createElement('span');
      dot.className = 'dot';
      dot.style.background = color;
      row.append(dot);
    }
    row.append(text);
    return row;
  }));
}

function valuesAt(chart, time) {
  const index = nearest(data.times, time);
  const lines = [[told(data.times[index]) + ' UTC']];
  for (const [figure, label, color] of data.charts[chart.dataset.chart]) {
    let at = index;
    while (at >= 0 && data.figures[figure][at] === null) at -= 1;
    if (at >= 0) lines.push([`${label}: ${rounded(data.figures[figure][at])}`, color]);
  }
  return [data.times[index], lines];
}

function changeAt(time) {
  const index = nearest(data.changes.map(change => change.at), time);
  const change = data.changes[index];
  const lines = [[`decision ${change.seq}, ${told(change.at)} UTC`], ...change.words.map(word => [word])];
  return [change.at, lines];
}

for (const chart of charts) {
  const area = chart.querySelector('.area');
  let from = null;
  area.addEventListener('pointermove', event => {
    const x = xAt(area, event);
    const isTimeline = chart.dataset.chart === 'changes';
    const [at, lines] = isTimeline ? changeAt(timeAt(x)) : valuesAt(chart, timeAt(x));
    mark(xOf(at), 'cross');
    fill(lines);
    tip.style.display = 'block';
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth;
    tip.style.left = (left ? Math.max(4, event.clientX - 16 - tip.offsetWidth) : event.clientX + 16) + 'px';
    tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)) + 'px';
    if (from !== null) mark(from, 'from');
  });
  area.addEventListener('pointerleave', () => {
    tip.style.display = 'none';
    unmark('cross');
    unmark('from');
    from = null;
  });
  area.addEventListener('pointerdown', event => { from = xAt(area, event); event.preventDefault(); });
  area.addEventListener('pointerup', event => {
    const to = xAt(area, event);
    if (from !== null && Math.abs(to - from) > (view[1] - view[0]) / 100) {
      view = [Math.min(from, to), Math.max(from, to)];
      show();
    }
    from = null;
    unmark('from');
  });
  area.addEventListener('dblclick', () => { view = [0, WIDTH]; show(); });
}
""".strip()
