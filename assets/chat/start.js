// What happens when the value changes, and at first. `extra` is what only the chat does with it.
let extra = () => {};

function draw() {
  const value = props.value || {};
  if (value.events) {
    hearAll(value);
    return;
  }
  learn(value.names);
  if (!arrange(value)) return;
  extra(value);
  drawLegend();
  stick();
}

for (const [source, name] of names) addChip(source, name);
