// Draws the value, at first and when it changes. Only the chat sets `extra`.
let extra = () => {};

function draw() {
  const value = props.value || {};
  learn(value.names);
  if (!arrange(value)) return;
  extra(value);
  drawLegend();
  stick();
}

for (const [source, name] of names) addChip(source, name);
