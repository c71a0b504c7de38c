@echo off
rem Starts Smart Embedder in a virtual environment of its own (local) or in a container (docker).
rem Only finds a Python and hands over to launcher\, which start_server.sh shares.
rem Programs are called: one that is itself a batch file, as pyenv's python is, would not come back.
setlocal EnableExtensions DisableDelayedExpansion
cd /d "%~dp0"
call :main %*
set "STATUS=%ERRORLEVEL%"
if %STATUS% equ 0 exit /b 0
rem A window that Explorer has opened for this file would close, and nobody could read the message.
if not defined CMDCMDLINE exit /b %STATUS%
set "CALLED=%CMDCMDLINE:"=%"
call set "REST=%%CALLED:%~f0=%%"
if not "%REST%"=="%CALLED%" pause
exit /b %STATUS%

:main
set "FOUND="
if defined PYTHON goto named_python
for %%V in ("py -3.13" "py -3.12" "py -3.11" python3 python .venv\Scripts\python.exe) do call :try_python %%~V
if not defined FOUND goto no_python

:hand_over
%FOUND% -m launcher %*
exit /b %ERRORLEVEL%

:named_python
call :try_python "%PYTHON%"
if defined FOUND goto hand_over
>&2 echo start_server: "PYTHON=%PYTHON%" is not a working Python 3.11 or newer.
exit /b 1

:try_python
if defined FOUND exit /b 0
call %* -c "import sys; sys.exit(sys.version_info < (3, 11))" >nul 2>&1
if %ERRORLEVEL% equ 0 set FOUND=%*
exit /b 0

rem What launcher\ does for docker, where there is no Python.
:no_python
if /i "%~1"=="docker" shift
set "FLAVOUR="
if "%~1"=="" set "FLAVOUR=auto"
for %%W in (cpu gpu auto) do if /i "%~1"=="%%W" set "FLAVOUR=%%W"
if not "%~2"=="" set "FLAVOUR="
if not defined FLAVOUR goto python_missing
call docker --version >nul 2>&1
if %ERRORLEVEL% neq 0 goto both_missing
call docker compose version >nul 2>&1
if %ERRORLEVEL% neq 0 goto compose_missing
call docker info >nul 2>&1
if %ERRORLEVEL% neq 0 goto daemon_missing
if not "%FLAVOUR%"=="auto" goto start_container
set "FLAVOUR=cpu"
call nvidia-smi >nul 2>&1
if %ERRORLEVEL% equ 0 set "FLAVOUR=gpu"
:start_container
rem It fails where the input is no console, and then nothing is asked.
call timeout /t 0 >nul 2>&1
if %ERRORLEVEL% neq 0 goto asked
call :ask_model DENSE_EMBEDDING_MODEL "Dense model" dense.txt "" Qwen/Qwen3-Embedding-0.6B
call :ask_model RERANKER_MODEL Reranker reranker.txt BAAI/bge-reranker-v2-m3 Qwen/Qwen3-Reranker-0.6B
:asked
call :tune_reranker
call :value_of MEMORY_LIMIT
if not defined VALUE set "VALUE=16g"
set "MEMORY=%VALUE%"
call :value_of PIDS_LIMIT
if not defined VALUE set "VALUE=2048"
echo Limits of the container: MEMORY_LIMIT=%MEMORY%, PIDS_LIMIT=%VALUE%.
call docker compose -f docker-compose.%FLAVOUR%.yml up --build -d
if %ERRORLEVEL% neq 0 goto docker_failed
echo Smart Embedder is starting. Logs: docker compose -f "%CD%\docker-compose.%FLAVOUR%.yml" logs -f
exit /b 0

rem VALUE becomes what the environment or .env sets a variable to.
:value_of
set "VALUE="
call set "VALUE=%%%~1%%"
if defined VALUE exit /b 0
if not exist .env exit /b 0
for /f "usebackq eol=# tokens=1* delims==" %%A in (".env") do (
  for %%N in ("%~1" "%~1 " "export %~1" "export %~1 ") do if /i "%%A"==%%N set "VALUE=%%B"
)
exit /b 0

rem Asks for a model that is not set, in the words of launcher\console.py; for no answer it is BGE.
:ask_model
call :value_of %~1
if defined VALUE exit /b 0
type launcher\%~3
:ask_again
set "ANSWER="
set /p "ANSWER=%~2, BGE or QWEN [BGE]: "
if not defined ANSWER set "ANSWER=BGE"
if /i "%ANSWER%"=="BGE" goto answered_bge
if /i "%ANSWER%"=="QWEN" goto answered_qwen
echo That is neither BGE nor QWEN.
goto ask_again
:answered_bge
if not "%~4"=="" set "%~1=%~4"
exit /b 0
:answered_qwen
set "%~1=%~5"
exit /b 0

rem Sets what launcher\gpu.py sets for a Qwen reranker, by the memory of the smallest GPU in MiB.
:tune_reranker
call :value_of RERANKER_MODEL
if not defined VALUE exit /b 0
if /i "%VALUE:qwen=%"=="%VALUE%" exit /b 0
set "BATCH=1"
set "LENGTH=2048"
if "%FLAVOUR%"=="cpu" goto set_limits
set "SMALLEST="
for /f %%M in ('nvidia-smi --query-gpu^=memory.total --format^=csv^,noheader^,nounits') do call :compare %%M
if not defined SMALLEST exit /b 0
set "BATCH=16"
set "LENGTH=8192"
if %SMALLEST% leq 8192 set "BATCH=8"
if %SMALLEST% leq 6144 set "BATCH=4"
if %SMALLEST% leq 6144 set "LENGTH=4096"
:set_limits
set "CHOSEN="
call :set_limit QWEN_RERANK_BATCH_SIZE %BATCH%
call :set_limit QWEN_RERANK_MAX_LENGTH %LENGTH%
if defined CHOSEN echo Set for this start: %CHOSEN:~2%.
exit /b 0

:compare
for /f "delims=0123456789" %%X in ("%~1") do exit /b 0
if not defined SMALLEST set "SMALLEST=%~1"
if %~1 lss %SMALLEST% set "SMALLEST=%~1"
exit /b 0

:set_limit
call :value_of %~1
if defined VALUE exit /b 0
set "%~1=%~2"
set "CHOSEN=%CHOSEN%, %~1=%~2"
exit /b 0

:python_missing
>&2 echo start_server: Python 3.11 or newer was not found: install it, or set PYTHON to its path.
exit /b 1

:both_missing
>&2 echo start_server: neither Python 3.11 or newer nor docker was found: install one of them.
exit /b 1

:compose_missing
>&2 echo start_server: 'docker compose' was not found: install Docker's compose plugin, 2.24.4 or newer.
exit /b 1

:daemon_missing
>&2 echo start_server: the Docker daemon does not answer, or you may not use it: 'docker info' says why.
exit /b 1

:docker_failed
>&2 echo start_server: docker compose could not start the service; its message above says why.
exit /b 1
