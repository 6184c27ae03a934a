"""Hold the style sheet of the report: light, system fonts, tables that scroll on narrow screens."""

from __future__ import annotations

from typing import Final

__all__ = ["STYLE"]

STYLE: Final = """
:root{--ink:#22272e;--soft:#5b6470;--line:#e2e6eb;--blue:#0072b2;color-scheme:light}
*{box-sizing:border-box}
body{margin:0;background:#f4f6f8;color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
  "DejaVu Sans",sans-serif;overflow-wrap:anywhere}
main{max-width:1160px;margin:0 auto;padding:40px 24px 64px}
header{margin:0 0 28px}
.kicker{color:var(--soft);margin:0;font-size:14px}
h1{font-size:34px;line-height:1.2;margin:10px 0 12px;letter-spacing:-.01em;text-wrap:balance}
.lead{font-size:17px;color:var(--soft);margin:0;max-width:76ch}
h2{font-size:20px;margin:0 0 4px}
h3{font-size:15px;margin:18px 0 6px}
section{background:#fff;border:1px solid var(--line);border-radius:10px;padding:22px 24px;margin:0 0 18px}
section p{color:var(--soft);margin:0 0 14px;max-width:92ch}
section img{display:block;max-width:100%;min-width:900px;height:auto;margin:0 auto}
.cards{display:flex;flex-wrap:wrap;gap:1px;padding:0;overflow:hidden;background:var(--line)}
.cards div{flex:1 1 170px;background:#fff;padding:18px 20px;display:flex;flex-direction:column}
.cards b{font-size:26px;line-height:1.2;color:var(--blue);white-space:nowrap}
.cards span{font-weight:600;font-size:14px}
.cards small{color:var(--soft);font-size:13px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;margin:8px 0;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--soft);text-align:left;border-bottom:2px solid var(--line);padding:5px 12px 5px 0;
  white-space:nowrap}
td{border-bottom:1px solid var(--line);padding:5px 12px 5px 0;white-space:nowrap}
.n{text-align:right}
.n+td:not(.n),.n+th:not(.n){padding-left:22px}
.tables table{font-size:13px}
td small{color:var(--soft)}
.tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:6px 40px}
summary{cursor:pointer;color:var(--blue)}
footer{color:var(--soft);font-size:13px;margin-top:24px}
@media(max-width:600px){main{padding:20px 10px 40px}section{padding:16px 14px}h1{font-size:24px}.cards b{font-size:21px}
  .tables>div{overflow-x:auto}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
