"""Layers in the formats of others, eStargz and zstd:chunked: their TOCs, made into ours."""
