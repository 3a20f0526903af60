// The page of `dbrdist-train --watch`: asks for what has changed, and draws the charts where plotly is there.
"use strict";
(() => {
  const SECONDS = 2, SLOWEST = 30;
  const marks = new Map(); // section -> mark of the text that the page shows
  const shown = new Map(); // name of a chart -> its element, its lines, and where it is zoomed to
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const connection = document.getElementById("connection");
  let wait = SECONDS;

  const ask = async (what) => {
    const answer = await fetch(what, {cache: "no-store"});
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };

  const replace = (name, text) => {
    const element = document.getElementById(name);
    if (!element) return;
    const before = [...element.querySelectorAll(".messages, .scroll")];
    const places = before.map((e) => [e.scrollTop, e.scrollLeft, e.scrollTop + e.clientHeight >= e.scrollHeight - 4]);
    const folds = new Map([...element.querySelectorAll("details")].map((e) => [e.firstChild.textContent, e.open]));
    element.innerHTML = text; // escaped by the server; the policy of the page forbids scripts in it
    for (const e of element.querySelectorAll("details")) e.open = folds.get(e.firstChild.textContent) ?? e.open;
    [...element.querySelectorAll(".messages, .scroll")].forEach((e, i) => {
      const [top, left, isAtEnd] = marks.has(name) && places[i] || [0, 0, true];
      e.scrollLeft = left;
      e.scrollTop = e.classList.contains("messages") && isAtEnd ? e.scrollHeight : top;
    });
  };

  const layout = (chart) => {
    const style = getComputedStyle(document.documentElement);
    const [ink, soft, line, page] = ["--ink", "--soft", "--line", "--page"].map((k) => style.getPropertyValue(k).trim());
    const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, color: soft, automargin: true};
    return {
      margin: {l: 56, r: 14, t: 8, b: 36}, font: {color: ink, size: 12}, paper_bgcolor: page, plot_bgcolor: page,
      hovermode: "closest", hoverlabel: {bgcolor: page, font: {color: ink}}, uirevision: "kept", autosize: true,
      showlegend: chart.lines.some((l) => l.legend), legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0},
      xaxis: {...axis, title: {text: "epoch", standoff: 6}}, yaxis: axis,
    };
  };

  const traces = (chart) => chart.lines.map((l) => ({
    x: l.x, y: l.y, name: l.legend || l.name, showlegend: Boolean(l.legend), type: "scatter", mode: l.x.length === 1 ? "markers" : "lines",
    line: {color: l.colour, width: 1.8, dash: l.dashed ? "dash" : "solid"}, marker: {color: l.colour},
    hovertemplate: `%{y:.5g} at epoch %{x:.5g}<extra>${l.name}</extra>`,
  }));

  const draw = (name, chart) =>
    Plotly.react(shown.get(name).plot, traces(chart), layout(chart), {displaylogo: false});

  const zoomed = async (name) => {
    const {range} = shown.get(name);
    const where = range ? `&from=${range[0]}&to=${range[1]}` : "";
    const {chart} = await ask(`chart?name=${encodeURIComponent(name)}${where}`);
    if (chart) await draw(name, chart);
  };

  const moved = (name) => (event) => {
    const one = shown.get(name);
    if (event["xaxis.range[0]"] !== undefined) one.range = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
    else if (event["xaxis.autorange"]) one.range = null;
    else return;
    zoomed(name).catch(failed);
  };

  const drawCharts = async (charts) => {
    const place = document.getElementById("charts");
    if (!shown.size) place.innerHTML = '<div class="charts"></div>';
    const names = new Set(charts.map((chart) => chart.name));
    for (const [name, one] of shown) if (!names.has(name)) { Plotly.purge(one.plot); one.box.remove(); shown.delete(name); }
    const added = charts.filter((chart) => !shown.has(chart.name));
    for (const chart of added) { // all boxes first: the grid gives them their widths
      const box = document.createElement("div"), title = document.createElement("h3"), plot = document.createElement("div");
      title.textContent = chart.title;
      plot.className = "plot";
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", chart.title);
      box.append(title, plot);
      place.firstChild.append(box);
      shown.set(chart.name, {box, plot, range: null, chart});
    }
    for (const chart of charts) {
      const one = shown.get(chart.name);
      one.chart = chart;
      if (one.range) await zoomed(chart.name);
      else await draw(chart.name, chart);
    }
    for (const chart of added) {
      const {plot} = shown.get(chart.name);
      plot.on("plotly_relayout", moved(chart.name));
      new ResizeObserver(() => { if (plot.isConnected) Plotly.Plots.resize(plot); }).observe(plot);
    }
  };

  const failed = () => {
    connection.textContent = "dbrdist-train --watch does not answer; the page shows what it said last.";
    wait = Math.min(wait * 1.5, SLOWEST);
  };

  const look = async () => {
    try {
      const known = [...marks.values()].join(",");
      const state = await ask(`state?known=${known}`);
      document.title = state.title;
      for (const [name, {mark, html}] of Object.entries(state.sections)) {
        replace(name, html);
        marks.set(name, mark);
      }
      if (state.charts && window.Plotly) {
        await drawCharts(state.charts.list);
        marks.set("charts", state.charts.mark);
      }
      connection.textContent = "";
      wait = SECONDS;
    } catch (error) {
      failed();
    }
    setTimeout(look, wait * 1000 * (document.hidden ? 5 : 1));
  };

  document.addEventListener("toggle", ({target}) => { // messages that were folded begin at their end
    for (const e of target.querySelectorAll(".messages")) if (!e.scrollTop) e.scrollTop = e.scrollHeight;
  }, true);
  dark.addEventListener("change", () => { for (const [name, one] of shown) draw(name, one.chart); });
  look();
})();
