async (text) => {
  if (!text) return "";
  const { token, name } = JSON.parse(text);
  const answer = await fetch("/download/" + token);
  if (!answer.ok) return "";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  return "";
}
