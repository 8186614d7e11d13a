"""Texts that an exported model is tried on, in English and Chinese; written for this, from no data set."""

from __future__ import annotations

from typing import Final

ENGLISH: Final = (
    "hello",
    "Write a Python function that reverses a linked list.",
    "Why does this program segfault when the list is empty?",
    "What is the capital of Portugal, and how many people live there?",
    "Solve 3x + 7 = 22 and show every step",
    "a train covers 240 km in two and a half hours; what is its average speed",
    "Recommend three novels for a long flight, none of them sad",
    "summarise the meeting notes below in five bullet points",
    "translate 'where is the station' into Japanese",
    "My order arrived broken and I would like my money back",
    "WHY IS THE BUILD FAILING AGAIN???",
    "explain the difference between a mutex and a semaphore to a beginner",
    "how do I cancel my subscription before it renews",
    "Write a haiku about rain on a tin roof",
    "What are the side effects of taking ibuprofen with coffee?",
    "plan a weekend in Lisbon for two people who like music",
    "def area(r):\n    return 3.14159 * r ** 2\n\nwhat does this function return for r = 2",
    "SELECT name, count(*) FROM users GROUP BY name HAVING count(*) > 1",
    "is it legal to record a phone call without telling the other person",
    "rewrite this paragraph so that a child can follow it",
    "naïve café, déjà vu: what do these words have in common?",
    "Tell me a joke about compilers 🙂",
    "compare the economies of Norway and Denmark since 1990",
    "set an alarm for half past six tomorrow morning",
)
CHINESE: Final = (
    "你好",
    "写一个 Python 函数，把链表反转过来。",
    "为什么列表为空的时候程序会崩溃？",
    "葡萄牙的首都是哪里，有多少人口？",
    "解方程 3x + 7 = 22，并写出每一步",
    "一列火车两个半小时行驶了二百四十公里，平均速度是多少",
    "推荐三本适合长途飞行时读的小说",
    "把下面的会议记录总结成五点",
    "把“车站在哪里”翻译成日语",
    "我收到的商品坏了，想要退款",
    "怎么又编译失败了？？？",
    "给初学者讲讲互斥锁和信号量的区别",
    "怎么在续费之前取消会员",
    "写一首关于雨打屋檐的短诗",
    "布洛芬和咖啡一起吃有什么副作用？",
    "为两个喜欢音乐的人安排一个里斯本的周末",
    "下面的代码有什么问题？\nfor i in range(10) print(i)",
    "查询重复用户名的 SQL 语句怎么写",
    "不告诉对方就给电话录音合法吗",
    "把这段话改写得让小孩子也能看懂",
    "繁體中文和简体中文有什么不同",
    "讲一个关于程序员的笑话 🙂",
    "比较一九九零年以来挪威和丹麦的经济",
    "明天早上六点半叫我起床",
)
ODD: Final = (
    "",
    "  leading and trailing   spaces  ",
    "tabs\tand\r\nnew lines",
    "1234567890 3.14 1e-9 0xff",
    "!!! ??? ... --- ;;;",
    "Ｆｕｌｌ　ｗｉｄｔｈ, e\u0301 combining, ﬁ ligature",
    "mixed 中英文 in one 句子 please 谢谢",
    "¿Dónde está la biblioteca?",
)

TRIPLES: Final = {
    "English": (
        ("How do I fix this compiler error?", "My program does not compile", "Book me a table"),
        ("Will it rain tomorrow?", "What will the weather be like?", "Sort a list in Python"),
        ("I want my money back", "How do I get a refund?", "Who painted this picture?"),
        ("What should I cook tonight?", "Ideas for dinner, please", "Solve this equation"),
    ),
    "Chinese": (
        ("帮我修复这个编译错误", "我的程序编译失败了，怎么办", "今天晚上吃什么好"),
        ("明天会下雨吗", "明天天气怎么样", "写一个排序算法"),
        ("我想要退款", "怎样才能把钱退回来", "这幅画是谁画的"),
        ("今晚做什么菜好", "推荐几道晚餐的菜", "请解这个方程"),
    ),
}
"""Of each language: a text, one that means the same in other words, one that does not."""
