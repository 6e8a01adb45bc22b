// The token of an answer that a page is about to request (TOKEN in app/service/answering.py). Nobody
// can guess it, and whoever knows it may watch the answer.
function newToken() {
  const bytes = crypto.getRandomValues(new Uint8Array(18));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_");
}
