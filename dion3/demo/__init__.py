"""The demo: a byte-level GPT on the text that ships with Python, trained by four optimizers.

data.py      the text, split by file into training and held-out bytes
gpt.py       the model, in plain PyTorch
recipes.py   the optimizers and their learning rates
train.py     one training run
figure.py    the plot
"""
