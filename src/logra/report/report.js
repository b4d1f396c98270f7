"use strict";
(() => {
  const search = document.getElementById("search");
  if (!search) return;
  const verdict = document.getElementById("verdict");
  const count = document.getElementById("count");
  const rows = [...document.querySelectorAll("#samples tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, place) => {
      const fits = words.every((word) => texts[place].includes(word));
      row.hidden = !fits || (verdict.value !== "" && row.dataset.verdict !== verdict.value);
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = `${shown} of ${rows.length} samples`;
  };
  search.addEventListener("input", filter);
  verdict.addEventListener("change", filter);
})();
