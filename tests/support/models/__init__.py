"""Small models of many architectures, and their tokenizers."""
