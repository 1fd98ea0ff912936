"""From a request to a plan: what is asked, where the KV of each token comes from, and who computes it."""
