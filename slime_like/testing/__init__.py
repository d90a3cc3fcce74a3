"""For tests, ours and users': a scripted engine that speaks SGLang's HTTP face."""
