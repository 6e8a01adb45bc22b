"""Short texts of many languages, as files in the encodings in which such files are found."""

TEXTS = {
    "German": (
        "Größe;Preis\nÄpfel;3,50\nBrötchen;0,40\n",
        "Die Prüfung dauerte länger als gedacht. Wir müssen über die Kosten für den Umbau reden.\n",
    ),
    "French": (
        "Élève;Note\nHélène;15\nJérôme;12\n",
        "La réunion a été très utile : le coût du dépôt sera réglé dès l’été, c’est sûr.\n",
    ),
    "Spanish": (
        "año;tamaño\n2024;pequeño\n",
        "¿Cuándo llegará el señor Muñoz? Mañana, según la última información de la compañía.\n",
    ),
    "Swedish": ("Över ån går en gångbro. Där är det vackert på våren.\n",),
    "Polish": (
        "Zażółć gęślą jaźń\n",
        "Spotkanie odbyło się wczoraj. Omówiliśmy budżet i następne kroki, także łączność.\n",
    ),
    "Czech": (
        "Příliš žluťoučký kůň\n",
        "Schůzka se uskuteční příští týden. Prosíme o potvrzení účasti, děkujeme.\n",
    ),
    "Hungarian": ("Az ülés jegyzőkönyve: a költségvetésről és a határidőkről beszéltünk.\n",),
    "Turkish": ("Toplantı notları: bütçe ve süre görüşüldü. Şimdi değişiklikler yapılıyor.\n",),
    "Lithuanian": ("Susitikimo užrašai: aptarėme biudžetą ir terminus. Ačiū už jūsų dėmesį.\n",),
    "Russian": (
        "товар;цена\nяблоки;120\nХлеб;45\n",
        "Отчёт о встрече: обсудили сроки и бюджет проекта. Следующая встреча в среду.\n",
    ),
    "Ukrainian": (
        "Звіт про зустріч: обговорили бюджет і терміни. Її підсумки надішлемо завтра.\n",
    ),
    "Bulgarian": ("Протокол от срещата: обсъдихме бюджета и сроковете на проекта.\n",),
    "Greek": ("Πρακτικά: συζητήσαμε τον προϋπολογισμό και τις προθεσμίες του έργου.\n",),
    "Hebrew": ("סיכום הפגישה: דיברנו על התקציב ועל לוח הזמנים של הפרויקט.\n",),
    "Arabic": ("محضر الاجتماع: ناقشنا الميزانية والمواعيد النهائية للمشروع.\n",),
    "Thai": ("บันทึกการประชุม: เราพูดคุยเรื่องงบประมาณและกำหนดเวลา\n",),
    "Simplified": (
        "产品名称,单价,数量\n苹果,3.5,10\n香蕉,2.8,25\n",
        "会议纪要：我们讨论了预算和时间安排，下次会议定在星期三。\n",
        "用 Python 写的程序，请先安装。\n",
    ),
    "Traditional": (
        "會議紀錄：討論了預算與時程。\n",
        "我們下星期三再開會，請大家先看過這份文件，謝謝。\n",
    ),
    "Japanese": (
        "商品名,単価,数量\nりんご,150,10\nバナナ,98,25\n",
        "会議の議事録です。予算と日程について話し合いました。次回は水曜日です。\n",
    ),
    "Korean": (
        "상품명,단가,수량\n사과,1500,10\n바나나,980,25\n",
        "회의록: 예산과 일정을 논의했습니다. 다음 회의는 수요일입니다.\n",
    ),
}
ENCODINGS = {
    "cp1252": ("German", "French", "Spanish", "Swedish"),
    "iso8859_15": ("German", "Spanish"),
    "mac_roman": ("German", "French"),
    "cp850": ("German", "French"),
    "cp1250": ("Polish", "Czech", "Hungarian"),
    "iso8859_2": ("Polish", "Czech", "Hungarian"),
    "cp852": ("Polish", "Czech"),
    "cp1254": ("Turkish",),
    "cp1257": ("Lithuanian",),
    "cp1251": ("Russian", "Ukrainian", "Bulgarian"),
    "koi8_r": ("Russian",),
    "koi8_u": ("Ukrainian",),
    "cp866": ("Russian",),
    "iso8859_5": ("Russian", "Bulgarian"),
    "cp1253": ("Greek",),
    "iso8859_7": ("Greek",),
    "cp1255": ("Hebrew",),
    "cp1256": ("Arabic",),
    "iso8859_6": ("Arabic",),
    "cp874": ("Thai",),
    "gb18030": ("Simplified",),
    "gbk": ("Simplified",),
    "big5": ("Traditional",),
    "shift_jis": ("Japanese",),
    "euc_jp": ("Japanese",),
    "iso2022_jp": ("Japanese",),
    "euc_kr": ("Korean",),
    "utf_16_le": ("German", "Russian", "Simplified", "Japanese", "Korean"),
    "utf_16_be": ("French", "Greek", "Traditional"),
    "utf_32_le": ("Polish",),
}


def files() -> list[tuple[str, str, bytes]]:
    """The encoding, the text and the content of each file that the encoding can write."""
    return [
        (encoding, text, content)
        for encoding, languages in ENCODINGS.items()
        for language in languages
        for text in TEXTS[language]
        if (content := text.encode(encoding, "ignore")).decode(encoding) == text
    ]
