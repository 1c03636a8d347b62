"""The heart of MQMK: the frozen ViT with prompts, the prompt pool and its files, the matchers, the predictor."""
