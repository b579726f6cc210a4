/** A small cache that evicts the least recently used result. */
export class Kept<T> {
  private readonly held = new Map<string, T>();

  constructor(private readonly most: number) {}

  has(key: string): T | undefined {
    return this.held.get(key);
  }

  get(key: string, make: () => T): T {
    return this.set(key, this.held.get(key) ?? make());
  }

  set(key: string, value: T): T {
    this.held.delete(key);
    this.held.set(key, value);
    if (this.held.size > this.most) this.held.delete(this.held.keys().next().value as string);
    return value;
  }
}
