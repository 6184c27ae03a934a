"""``python -m tools.bench.codecs``: the comparison of codecs (`codec_comparison`)."""

from tools.bench.codecs.codec_comparison import main

main()
