"""Ask a finished run: chat, evaluate, and sample answers for new training rows. Its model or a server answers.

    chat          `finetune chat`: base, tuned model, or both
    evaluation    `finetune eval`: held-out loss, scored answers, given options, benchmarks
    sample        `finetune sample`: several answers to each prompt, and the rows that a checker keeps
    endpoint      a server that speaks OpenAI's API, in place of the run's model

Verbs import what they need inside their functions, so that none loads torch for another.

May import: hand_over, training and what is below them.
"""
