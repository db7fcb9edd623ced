"""The store's schema, as numbered migrations."""
