declare module "*?text" {
  const text: string;
  export default text;
}
declare module "*.css" {
  const text: string;
  export default text;
}
declare module "elkjs/lib/elk-api.js" {
  export { default, type ElkNode } from "elkjs/lib/elk-api";
}
