// Which instruction sets this machine can run.
#pragma once

#include <string>
#include <vector>

namespace genai {

// Compiled in and supported by this machine, lowest first; the last one is the default.
std::vector<std::string> supported_isas();

}  // namespace genai
